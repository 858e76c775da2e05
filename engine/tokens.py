"""Token ids of an engine run: prompts from block hashes, next tokens and drafts from a seed.

All of them are pure functions of (seed, request, position), so that every schedule, chunk size and
preemption of a run sees the same tokens. Integers only, modulo 2^64.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from ..rawkernels.reference.activation_hash import GOLDEN64, splitmix64

HASH_BLOCK_TOKENS = 512  # prompt tokens that one id of a Mooncake trace stands for

# First word of each hash, so that streams of one seed never meet.
PROMPT_STREAM, BLOCK_STREAM, NEXT_STREAM, ACCEPT_STREAM, WRONG_STREAM = range(1, 6)
REPEAT_STREAM, SOURCE_STREAM = 6, 7

PASSAGE_TOKENS = 16  # tokens that repeat together
PASSAGES_BACK = 8  # how many passages back a repeat may begin, at most


def hash_words(seed: int, *words) -> np.ndarray:
    """uint64 hash of a seed and words (non-negative ints or arrays of them, broadcast together)."""
    key = np.uint64(seed % 2**64)
    with np.errstate(over="ignore"):
        for word in words:
            key = splitmix64(key ^ (np.asarray(word).astype(np.uint64) * GOLDEN64))
    return key


def request_key(request_id: str) -> np.uint64:
    """A 64-bit word for a request id, the same on every machine and in every run."""
    digest = hashlib.blake2b(request_id.encode("utf-8"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def prompt_from_hash_ids(
    hash_ids,
    num_tokens: int,
    *,
    seed: int,
    vocab_size: int,
    block_tokens: int = HASH_BLOCK_TOKENS,
) -> np.ndarray:
    """int32 [num_tokens]: `block_tokens` tokens for each block id, equal ids giving equal tokens. A
    last block that is not full has the first tokens of its block."""
    ids = np.asarray(hash_ids, dtype=np.int64)
    offsets = np.arange(block_tokens, dtype=np.int64)
    blocks = hash_words(seed, BLOCK_STREAM, ids[:, None], offsets[None, :])
    return _to_vocab(blocks.reshape(-1)[:num_tokens], vocab_size)


def prompt_from_seed(request_id: str, num_tokens: int, *, seed: int, vocab_size: int) -> np.ndarray:
    """int32 [num_tokens]: a prompt of its own for each request id."""
    positions = np.arange(num_tokens, dtype=np.int64)
    return _to_vocab(
        hash_words(seed, PROMPT_STREAM, request_key(request_id), positions), vocab_size
    )


@dataclass(frozen=True)
class TokenRules:
    """What the model of a seeded run says: `accept_rate` is the chance that a draft is right,
    `repeat_rate` that a passage of 16 tokens repeats one of the 8 before it."""

    seed: int
    vocab_size: int
    accept_rate: float
    tokens_per_step: int
    repeat_rate: float = 0.0

    def next_tokens(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32: the right token of each (request key, position)."""
        if self.repeat_rate > 0:
            positions = self._origins(keys, positions)
        return _to_vocab(hash_words(self.seed, NEXT_STREAM, keys, positions), self.vocab_size)

    def _origins(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64: where the token of each (request key, position) was said first."""
        keys, at = np.broadcast_arrays(keys, np.asarray(positions, np.int64))
        while True:
            passage = at // PASSAGE_TOKENS  # rounded down, of positions that are not negative
            chance = hash_words(self.seed, REPEAT_STREAM, keys, passage) >> np.uint64(11)
            repeats = (chance.astype(np.float64) * 2.0**-53 < self.repeat_rate) & (passage > 0)
            if not repeats.any():
                return at
            most = np.clip(passage, 1, PASSAGES_BACK).astype(np.uint64)
            back = 1 + (hash_words(self.seed, SOURCE_STREAM, keys, passage) % most).astype(np.int64)
            at = np.where(repeats, at - back * PASSAGE_TOKENS, at)

    def drafts(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32: the drafted token of each (request key, position): the right one with probability
        `accept_rate`, else another one (of a vocabulary of one token there is no other)."""
        right = self.next_tokens(keys, positions)
        chance = hash_words(self.seed, ACCEPT_STREAM, keys, positions) >> np.uint64(11)
        is_right = chance.astype(np.float64) * 2.0**-53 < self.accept_rate
        shift = hash_words(self.seed, WRONG_STREAM, keys, positions)
        others = np.uint64(max(self.vocab_size - 1, 1))
        moved = (right.astype(np.int64) + 1 + (shift % others).astype(np.int64)) % self.vocab_size
        return np.where(is_right, right, moved).astype(np.int32)


@dataclass(frozen=True)
class StepTokens:
    """What a step decides for its sequences, as `Engine.commit` takes it."""

    accepted: np.ndarray  # int32 [num_seqs], drafts kept
    next_tokens: np.ndarray  # int32 [num_seqs]
    drafts: np.ndarray  # int32 [num_seqs, tokens_per_step - 1]


def decide_step(
    rules: TokenRules,
    keys: np.ndarray,
    first_positions: np.ndarray,
    num_drafts: np.ndarray,
    draft_tokens: np.ndarray,
) -> StepTokens:
    """Accepted drafts, next token and next drafts of each sequence of a step.

    keys            uint64 [num_seqs]
    first_positions int64 [num_seqs]     position of the last token known before the step's drafts
    num_drafts      int32 [num_seqs]
    draft_tokens    int32 [num_seqs, D]  drafts of first_position + 1 and on, then anything

    The accepted drafts are the leading run of right ones.
    """
    keys = np.asarray(keys, dtype=np.uint64)
    first_positions = np.asarray(first_positions, dtype=np.int64)
    width = draft_tokens.shape[1]
    columns = np.arange(width)
    truth = rules.next_tokens(keys[:, None], first_positions[:, None] + 1 + columns[None, :])
    kept = (draft_tokens == truth) & (columns[None, :] < num_drafts[:, None])
    accepted = np.cumprod(kept, axis=1).sum(axis=1).astype(np.int32)
    next_positions = first_positions + accepted + 1
    ahead = 1 + np.arange(rules.tokens_per_step - 1)
    return StepTokens(
        accepted,
        rules.next_tokens(keys, next_positions),
        rules.drafts(keys[:, None], next_positions[:, None] + ahead[None, :]),
    )


def _to_vocab(words: np.ndarray, vocab_size: int) -> np.ndarray:
    return (words % np.uint64(vocab_size)).astype(np.int32)
