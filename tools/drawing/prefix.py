"""The contracts of the prefix cache side by side, as a picture."""

from typing import Any

import numpy as np

from .figure import new_figure, save_figure


def write_contracts(report: dict[str, Any], path: str) -> None:
    """Draws the side-by-side report of `ringslab prefix` into one file, four panels."""
    figure = new_figure(12, 8)
    panels = figure.subplots(2, 2)
    rows = report["rows"]
    names = [row["contract"] for row in rows]
    panels[0, 0].bar(names, [row["seconds"] for row in rows])
    panels[0, 0].set_title("Seconds")
    panels[0, 1].bar(names, [row["computed_tokens"] for row in rows], label="computed")
    panels[0, 1].bar(names, [row["replayed_tokens"] for row in rows], label="replayed")
    panels[0, 1].set_title("Tokens")
    panels[0, 1].legend()
    panels[1, 0].bar(names, [row["hit_blocks"] for row in rows], label="hit")
    best = max(row["best_blocks"] or 0 for row in rows)
    panels[1, 0].axhline(best, color="0.6", linestyle=":", label="best possible on this trace")
    # The run without a cache counts in blocks of the trace, the others in those of the cache.
    panels[1, 0].set_title(f"Prompt blocks, of {rows[-1]['prompt_blocks']:,}")
    panels[1, 0].legend(loc="lower left")
    for offset, part in ((-0.2, "stored_layers"), (0.2, "rebuilt_layers")):
        largest = [row["difference"][part]["largest"] for row in rows]
        at = np.arange(len(rows)) + offset
        panels[1, 1].bar(at, largest, width=0.4, label=part.replace("_", " "))
    panels[1, 1].set_xticks(range(len(rows)), names)
    panels[1, 1].set_title(f"Largest difference of an output to {names[0]}")
    panels[1, 1].legend()
    for axes in panels.flat:
        axes.set_ylim(bottom=0)
    panels[1, 0].set_ylim(top=max(1, 1.1 * best))  # the line of the best, not on the frame
    figure.suptitle(f"{report['model']} on {report['backend']}: {report['requests']:,} requests")
    save_figure(figure, path)
