"""The sequence table: what the scheduler knows of every live request, as arrays with a row each."""

import numpy as np

# Phases of a row.
FREE, WAITING, PREFILL, DECODE = 0, 1, 2, 3
PHASE_NAMES = {WAITING: "waiting", PREFILL: "prefill", DECODE: "decode"}

FIRST_ROWS = 16
NO_STOP = np.iinfo(np.int64).max


class SequenceTable:
    """Rows of live requests; a row is free, waiting (no state slot), or running in a phase.

    phase         int8   [rows]
    state_id      int32  [rows]  -1 where the row holds no state slot
    prompt_len    int64  [rows]
    num_tokens    int64  [rows]  known tokens: the prompt and what was generated
    num_computed  int64  [rows]  the first so many of them are in the sequence's rings
    max_tokens    int64  [rows]  where it ends: prompt_len + max_new_tokens
    order         int64  [rows]  counts admissions
    turn          int64  [rows]  step of the last decode batch
    epoch         int64  [rows]  changes when what is in flight for the row no longer counts
    last_token    int32  [rows]  the last known token
    num_drafts    int32  [rows]  drafts of the next decode step
    drafts        int32  [rows, draft_columns]
    start            int64 [rows]  where computing began in the row's slot; above 0 after a hit
    stop             int64 [rows]  a prefill chunk must end there at the latest
    swa_valid_start  int64 [rows]  ring positions below it are missing
    first_output     int64 [rows]  positions below it are computed to rebuild rings only
    ids, tokens   lists          request id, and a buffer whose first num_tokens are known

    In DECODE num_tokens = num_computed + 1: the last token is the first of the next step.
    """

    def __init__(self, draft_columns: int) -> None:
        self.phase = np.zeros(FIRST_ROWS, np.int8)
        self.state_id = np.full(FIRST_ROWS, -1, np.int32)
        self.prompt_len = np.zeros(FIRST_ROWS, np.int64)
        self.num_tokens = np.zeros(FIRST_ROWS, np.int64)
        self.num_computed = np.zeros(FIRST_ROWS, np.int64)
        self.max_tokens = np.zeros(FIRST_ROWS, np.int64)
        self.order = np.zeros(FIRST_ROWS, np.int64)
        self.turn = np.zeros(FIRST_ROWS, np.int64)
        self.epoch = np.zeros(FIRST_ROWS, np.int64)
        self.start = np.zeros(FIRST_ROWS, np.int64)
        self.stop = np.zeros(FIRST_ROWS, np.int64)
        self.swa_valid_start = np.zeros(FIRST_ROWS, np.int64)
        self.first_output = np.zeros(FIRST_ROWS, np.int64)
        self.last_token = np.zeros(FIRST_ROWS, np.int32)
        self.num_drafts = np.zeros(FIRST_ROWS, np.int32)
        self.drafts = np.zeros((FIRST_ROWS, draft_columns), np.int32)
        self.ids: list[str | None] = [None] * FIRST_ROWS
        self.tokens: list[np.ndarray | None] = [None] * FIRST_ROWS
        self.free_rows = list(range(FIRST_ROWS - 1, -1, -1))

    def add(self, id: str, prompt: np.ndarray, max_new_tokens: int) -> int:
        """A waiting row for a checked request; the prompt is copied."""
        if not self.free_rows:
            self._grow()
        row = self.free_rows.pop()
        self.phase[row] = WAITING
        self.state_id[row] = -1
        self.prompt_len[row] = self.num_tokens[row] = prompt.shape[0]
        self.rewind(row)
        self.stop[row] = NO_STOP
        self.max_tokens[row] = prompt.shape[0] + max_new_tokens
        self.epoch[row] += 1
        self.ids[row] = id
        self.tokens[row] = prompt.astype(np.int32)
        return row

    def rewind(self, row: int) -> None:
        """Nothing of the row is computed: it begins at position 0, and its rings lack nothing."""
        self.num_computed[row] = self.num_drafts[row] = 0
        self.start[row] = self.swa_valid_start[row] = self.first_output[row] = 0

    def free(self, row: int) -> None:
        self.phase[row] = FREE
        self.epoch[row] += 1
        self.ids[row] = self.tokens[row] = None
        self.free_rows.append(row)

    def append(self, rows: np.ndarray, new: np.ndarray, count: np.ndarray) -> None:
        """The first count[i] tokens of new[i] become known in rows[i]. A buffer doubles when it is
        full, up to what the request may reach."""
        old = self.num_tokens[rows]
        end = old + count
        assert (end <= self.max_tokens[rows]).all()
        for row, begin, stop, line in zip(
            rows.tolist(), old.tolist(), end.tolist(), new, strict=True
        ):
            if stop > self.tokens[row].shape[0]:
                self._lengthen(row, begin, stop)
            self.tokens[row][begin:stop] = line[: stop - begin]
        self.num_tokens[rows] = end
        some = count > 0
        self.last_token[rows[some]] = new[some, count[some] - 1]

    def _lengthen(self, row: int, used: int, needed: int) -> None:
        size = min(max(2 * used, needed), int(self.max_tokens[row]))
        longer = np.empty(size, np.int32)
        longer[:used] = self.tokens[row][:used]
        self.tokens[row] = longer

    def known(self, row: int) -> np.ndarray:
        """Prompt and generated tokens, int32 [num_tokens]; a view."""
        return self.tokens[row][: self.num_tokens[row]]

    def rows_in(self, phase: int) -> np.ndarray:
        """Rows in a phase, in the order of their admission."""
        rows = np.flatnonzero(self.phase == phase)
        return rows[np.argsort(self.order[rows], kind="stable")]

    def _grow(self) -> None:
        old = self.phase.shape[0]
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self.ids += [None] * old
        self.tokens += [None] * old
        self.free_rows = list(range(2 * old - 1, old - 1, -1))
