"""docs/public-cases.md against the tests: every case is there once, and names tests that exist and
carry its id."""

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TABLE = TESTS.parent / "docs" / "public-cases.md"
CASES = {
    "M": "01 02 03 04 05 07 08 09 11 12",
    "N": "01 03 04",
    "R": "01 02 04 05 08 09 13 14",
    "P": "01 02 03 04 07 09 10",
    "Q": "01 02 04 05 07 09 10 13 14 16",
    "O": "01 04 05 06",
    "S": "01 02 05 07",
    "X": "01 03 05 08 10",
    "C": "01 02 03 05 06 07 09 10",
    "K": "01 02 06 07 08 10 11",
    "G": "01 02 05 06 08 09 10",
    "Y": "01 02 03 05 06 08 09 10",
    "B": "01 02 03 05",
}
IDS = [letter + number for letter, numbers in CASES.items() for number in numbers.split()]


def rows():
    """id -> the cells of its row."""
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| [A-Z]\d\d \|", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == 5 for row in cells)
    assert not [id for id, count in Counter(row[0] for row in cells).items() if count > 1]
    return {row[0]: row[1:] for row in cells}


def names_by_id():
    """id -> names of the tests that carry it, from the sources of all tests."""
    found = {id: set() for id in IDS}
    for path in TESTS.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for id in re.findall(r"(?<=_)[a-z]\d\d(?=_)", node.name):
                    found.setdefault(id.upper(), set()).add(node.name)
    return found


def test_every_case_has_one_row():
    """85 cases, each with where it was seen, what broke there, tests, and what was found here."""
    assert len(IDS) == 85
    assert list(rows()) == IDS
    for id, cells in rows().items():
        assert all(cells), id
        assert re.match(r"[\w.-]+/[\w.-]+#\d+$|https?://", cells[0]), (id, cells[0])


def test_the_table_names_the_tests():
    """The tests that a row names exist and carry its id; the line above the table names the rows
    that have none yet."""
    found, is_open = names_by_id(), []
    for id, (_, _, tests, _) in rows().items():
        named = set(re.findall(r"`(\w+)`", tests))
        if tests == "open":
            is_open.append(id)
        else:
            assert named, id
            assert named <= found[id], f"{id}: there is no test {sorted(named - found[id])}"
    said = re.search(r"^85 cases, (\d+) with tests(?:; open: ([^.]*))?\.$", TABLE.read_text(), re.M)
    assert said, "the count of cases is missing"
    assert int(said[1]) == 85 - len(is_open)
    assert (said[2].split(", ") if said[2] else []) == is_open
