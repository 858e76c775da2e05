"""What a prefix planner says: which snapshots to take and restore, and what it counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .prefix_rules import Resume

RINGS, PAGES = "rings", "pages"  # kinds of layers: with a window, and those that see all keys


@dataclass(frozen=True)
class Stage:
    """Room for snapshots of boundaries inside a chunk, which are made of the chunk's new records.

    places    of them in one batch
    ring_len  of the longest ring: as many tokens of the chunk must come before the boundary
    """

    places: int
    ring_len: int


@dataclass(frozen=True)
class StagedBoundary:
    """The batch in flight passes a boundary of a row, whose snapshot goes to a place of the
    stage."""

    row: int
    boundary: int
    place: int


@dataclass(frozen=True)
class SnapshotOrder:
    """Copy the state slot now, or the place of the stage where one is given: it holds the prefix
    that `keys[blocks - 1]` names, and the pages of `table` (ids of the paged pool, in order; None
    where nothing is paged) its tokens."""

    state_id: int
    keys: Sequence[bytes]
    blocks: int
    table: np.ndarray | None = None
    place: int | None = None


@dataclass(frozen=True)
class RestoreOrder:
    """Copy a snapshot into a row's state slot now, and its pages to those of `table`."""

    row: int
    state_id: int
    snapshot: Any
    table: np.ndarray | None = None


@dataclass
class Claim:
    """A hit that a waiting row will use, with the snapshot in hand: nothing can fail later."""

    resume: Resume
    blocks: int
    snapshot: Any


@dataclass
class PlannerCounters:
    """admissions             rows that got a slot, again after a preemption too
    hits, hit_blocks       requests that began with a cached prefix, and its blocks; what a request
                           finds after a preemption is not among them
    hit_tokens             tokens of those prefixes
    replayed_tokens        of these, the ones computed again to rebuild rings
    whole_blocks           of all prompts
    best_blocks            of these, what an endless cache could have given that has every prefix of
                           a request the moment it is submitted; counted where `seen` is a set
    failed_reads           look-ups that the index promised and the store did not keep
    """

    admissions: int = 0
    hits: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    replayed_tokens: int = 0
    whole_blocks: int = 0
    best_blocks: int = 0
    failed_reads: int = 0
