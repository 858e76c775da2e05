"""Request traces: Mooncake JSONL, Azure CSV, and a seeded synthetic one.

A reader gives lengths and block ids only; the tokens of a prompt are made when it is submitted.
Timestamps must not fall, and are kept as seconds after the first request.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import numpy as np

from ..layouts.errors import TraceError
from ..layouts.rings import MAX_POSITION
from ..layouts.sizes import div_ceil
from .tokens import (
    HASH_BLOCK_TOKENS,
    hash_words,
    prompt_from_hash_ids,
    prompt_from_seed,
)

TraceKind = Literal["mooncake", "azure", "synthetic"]
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_DIGITS = 20  # of a length in a CSV file
PROMPT_LEN_STREAM, OUTPUT_LEN_STREAM = 101, 102  # first words of the synthetic trace's hashes


@dataclass(frozen=True)
class TraceEntry:
    """One request of a trace; `hash_ids` is empty where the trace has none. An id stands for
    `block_tokens` tokens."""

    id: str
    prompt_len: int
    max_new_tokens: int
    arrival_s: float
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = HASH_BLOCK_TOKENS

    def prompt(self, *, seed: int, vocab_size: int) -> np.ndarray:
        """int32 [prompt_len]."""
        if self.hash_ids:
            return prompt_from_hash_ids(
                self.hash_ids,
                self.prompt_len,
                seed=seed,
                vocab_size=vocab_size,
                block_tokens=self.block_tokens,
            )
        return prompt_from_seed(self.id, self.prompt_len, seed=seed, vocab_size=vocab_size)


def trace_kind(path: str | Path) -> TraceKind:
    """The kind of a trace file by its name. Raises TraceError for any but .jsonl and .csv."""
    suffix = Path(path).suffix.lower()
    kinds: dict[str, TraceKind] = {".jsonl": "mooncake", ".csv": "azure"}
    if suffix not in kinds:
        raise TraceError(
            f"{path}: cannot tell the kind of trace from {suffix!r}; use a .jsonl file (Mooncake) "
            "or a .csv file (Azure)"
        )
    return kinds[suffix]


def read_trace(
    path: str | Path,
    kind: TraceKind | None = None,
    *,
    num_requests: int | None = None,
    max_prompt_len: int | None = None,
    block_tokens: int = HASH_BLOCK_TOKENS,
) -> list[TraceEntry]:
    """The first `num_requests` requests of a trace file (None: all), prompts cut to
    `max_prompt_len` tokens (None: as they are). With `block_tokens` lengths shrink (or grow) by
    block_tokens / 512: whole blocks of 512 tokens become whole blocks, a partial one stays partial.

    Raises TraceError naming file, line and what is wrong: a file that cannot be read, is empty or
    truncated, a line that is no record, missing or double columns, lengths that are negative,
    fractional or beyond int32, times that fall, hash ids that do not cover the prompt.
    """
    path = Path(path)
    kind = kind or trace_kind(path)
    readers = {"mooncake": _read_mooncake, "azure": _read_azure}
    if kind not in readers:
        raise TraceError(f"{path}: kind={kind!r} is not read from a file; use mooncake or azure")
    entries: list[TraceEntry] = []
    last_arrival = 0.0
    try:
        for line, entry in readers[kind](path):
            if entry.arrival_s < last_arrival:
                raise TraceError(
                    f"{path}:{line}: time goes back, from {last_arrival:g} s to "
                    f"{entry.arrival_s:g} s after the first request; sort the trace by time"
                )
            last_arrival = entry.arrival_s
            entries.append(_capped(_scaled(entry, block_tokens), max_prompt_len))
            if len(entries) == num_requests:
                break
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not UTF-8 text at byte {error.start}") from error
    if not entries:
        raise TraceError(f"{path}: has no requests")
    return entries


def synthetic_trace(
    *,
    seed: int,
    num_requests: int,
    prompt_len: tuple[int, int],
    output_len: tuple[int, int],
    max_prompt_len: int | None = None,
) -> list[TraceEntry]:
    """`num_requests` requests that all arrive at once, lengths uniform in inclusive ranges.

    Raises TraceError for no requests, and for a range that is empty or starts too low (a prompt
    has at least one token).
    """
    if num_requests < 1:
        raise TraceError(f"synthetic trace: num_requests={num_requests} but must be at least 1")
    for name, (low, last), least in (("prompt_len", prompt_len, 1), ("output_len", output_len, 0)):
        if low < least or last < low:
            raise TraceError(
                f"synthetic trace: {name}=[{low}, {last}] but must rise, from {least} or more"
            )
    ids = np.arange(num_requests)
    entries = []
    for i, prompt_word, output_word in zip(
        range(num_requests),
        hash_words(seed, PROMPT_LEN_STREAM, ids),
        hash_words(seed, OUTPUT_LEN_STREAM, ids),
        strict=True,
    ):
        prompt = prompt_len[0] + int(prompt_word) % (prompt_len[1] - prompt_len[0] + 1)
        output = output_len[0] + int(output_word) % (output_len[1] - output_len[0] + 1)
        entries.append(_capped(TraceEntry(_request_id(i), prompt, output, 0.0), max_prompt_len))
    return entries


def _read_mooncake(path: Path) -> Iterator[tuple[int, TraceEntry]]:
    first_time = None
    index = 0
    with open(path, encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            record = _json_record(path, line, text)
            time_ms = _number(path, line, "timestamp", record["timestamp"])
            first_time = time_ms if first_time is None else first_time
            prompt_len = _length(path, line, "input_length", record["input_length"], least=1)
            output_len = _length(path, line, "output_length", record["output_length"], least=0)
            hash_ids = _hash_ids(path, line, record["hash_ids"], prompt_len)
            arrival = (time_ms - first_time) / 1000.0
            yield line, TraceEntry(_request_id(index), prompt_len, output_len, arrival, hash_ids)
            index += 1


def _json_record(path: Path, line: int, text: str) -> dict:
    def refuse_doubles(pairs: list) -> dict:
        names = [name for name, _ in pairs]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise TraceError(f"{path}:{line}: key {doubles[0]!r} is there twice")
        return dict(pairs)

    try:
        record = json.loads(text, object_pairs_hook=refuse_doubles)
    except (ValueError, RecursionError) as error:  # ValueError: an integer too long to read, too
        cut = "" if text.endswith("\n") else " (the last line, which may have been cut off)"
        where = getattr(error, "colno", 1)
        raise TraceError(f"{path}:{line}:{where}: is not a JSON record{cut}: {error}") from error
    if not isinstance(record, dict):
        raise TraceError(f"{path}:{line}: is {type(record).__name__}, not a JSON object")
    for key in MOONCAKE_KEYS:
        if key not in record:
            raise TraceError(
                f"{path}:{line}: key {key!r} is missing; a record has {', '.join(MOONCAKE_KEYS)}"
            )
    return record


def _hash_ids(path: Path, line: int, ids, prompt_len: int) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise TraceError(f"{path}:{line}: hash_ids is {type(ids).__name__}, not a list")
    for i, block in enumerate(ids):
        if type(block) is not int or not 0 <= block < 2**63:
            raise TraceError(
                f"{path}:{line}: hash_ids[{i}]={block!r:.80} but must be an integer in "
                "0 .. 2^63 - 1"
            )
    needed = div_ceil(prompt_len, HASH_BLOCK_TOKENS)
    if len(ids) != needed:
        raise TraceError(
            f"{path}:{line}: {len(ids)} hash_ids for input_length={prompt_len}, which has {needed} "
            f"blocks of {HASH_BLOCK_TOKENS} tokens"
        )
    return tuple(ids)


def _read_azure(path: Path) -> Iterator[tuple[int, TraceEntry]]:
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            columns = _azure_columns(path, next(rows, None))
            first_time = None
            index = 0
            for row in rows:
                line = rows.line_num
                if not row:
                    continue
                if len(row) != len(columns):
                    raise TraceError(
                        f"{path}:{line}: has {len(row)} fields but the header has {len(columns)}"
                    )
                record = dict(zip(columns, row, strict=True))
                time = _azure_time(path, line, record["TIMESTAMP"])
                first_time = time if first_time is None else first_time
                prompt = _length(path, line, "ContextTokens", record["ContextTokens"], least=1)
                output = _length(path, line, "GeneratedTokens", record["GeneratedTokens"], least=0)
                yield line, TraceEntry(_request_id(index), prompt, output, time - first_time)
                index += 1
        except csv.Error as error:
            raise TraceError(f"{path}:{rows.line_num}: is not CSV: {error}") from error


def _azure_columns(path: Path, header: list[str] | None) -> list[str]:
    if header is None:
        raise TraceError(f"{path}: is empty; the first line must be {','.join(AZURE_COLUMNS)}")
    columns = [name.strip().removeprefix("\ufeff") for name in header]
    for name in columns:
        if columns.count(name) > 1:
            raise TraceError(f"{path}:1: column {name!r} is there {columns.count(name)} times")
    for name in AZURE_COLUMNS:
        if name not in columns:
            raise TraceError(
                f"{path}:1: column {name!r} is missing; the header is {','.join(columns)!r} but "
                f"must have {','.join(AZURE_COLUMNS)}"
            )
    return columns


def _azure_time(path: Path, line: int, text: str) -> float:
    """Seconds since 1970 of `2023-11-16 18:15:46.6805900` (the trace has seven digits)."""
    whole, _, fraction = text.strip().partition(".")
    try:
        if fraction and not fraction.isdecimal():
            raise ValueError(f"{fraction!r} is no fraction of a second")
        since_epoch = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S") - datetime(1970, 1, 1)
    except ValueError as error:
        raise TraceError(f"{path}:{line}: TIMESTAMP={text!r} is not a time: {error}") from error
    return since_epoch.total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)


def _number(path: Path, line: int, name: str, value) -> float:
    if type(value) not in (int, float) or not 0 <= value < 2**53:
        raise TraceError(f"{path}:{line}: {name}={value!r:.80} but must be a number of at least 0")
    return float(value)


def _length(path: Path, line: int, name: str, value, *, least: int) -> int:
    if isinstance(value, str):
        digits = value.strip()
        is_whole = digits.removeprefix("-").isdecimal() and digits.isascii()
        # Python refuses to read thousands of digits; any length that is allowed has ten at most.
        value = int(digits) if is_whole and len(digits) <= MAX_DIGITS else value
    if type(value) is not int or value < least or value > MAX_POSITION:
        raise TraceError(
            f"{path}:{line}: {name}={value!r:.80} but must be an integer in {least} .. "
            f"{MAX_POSITION}"
        )
    return value


def _scaled(entry: TraceEntry, block_tokens: int) -> TraceEntry:
    if block_tokens == HASH_BLOCK_TOKENS:
        return entry
    blocks, rest = divmod(entry.prompt_len, HASH_BLOCK_TOKENS)
    # Rounded down, so that a partial block stays one, but at least a token of it.
    part = max(rest * block_tokens // HASH_BLOCK_TOKENS, 1) if rest else 0
    return replace(
        entry,
        prompt_len=blocks * block_tokens + part,
        max_new_tokens=div_ceil(entry.max_new_tokens * block_tokens, HASH_BLOCK_TOKENS),
        block_tokens=block_tokens,
    )


def _capped(entry: TraceEntry, max_prompt_len: int | None) -> TraceEntry:
    if max_prompt_len is None or entry.prompt_len <= max_prompt_len:
        return entry
    ids = entry.hash_ids[: div_ceil(max_prompt_len, entry.block_tokens)]
    return replace(entry, prompt_len=max_prompt_len, hash_ids=ids)


def _request_id(index: int) -> str:
    return f"r{index:05d}"
