"""An oracle of other hands: the attention layers of small random Mistral, Gemma 2, Gemma 3 and
gpt-oss models of the `transformers` package against window_attention, on the same projections.

The models run as they are, with their own caches, masks and eager attention in float32. Between
projection and attention q, k and v are rounded to bf16, and every layer's keys are kept here, all
of them, so that windows, caps and sinks are ours alone on this side.
"""

import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
from attention_cases import BF16, ends_of, run_attention

from ringslab.rawkernels.reference.bound import assert_within_bound, expected_attention

torch = pytest.importorskip("torch", reason="needs PyTorch, for transformers")
transformers = pytest.importorskip("transformers", reason="needs the package transformers")

WINDOW, PROMPT, CHUNK, STEPS = 8, 21, 13, 30  # decode goes past several windows
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "head_dim": 64,
    "initializer_range": 0.3,  # scores of several units
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
MODELS = {
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}, (8, 2)),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 48,
            "layer_types": [LOCAL, GLOBAL] * 2,
        },
        (4, 2),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 40,
            "layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL],
        },
        (4, 1),
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": [LOCAL, GLOBAL] * 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        (8, 1),
    ),
}


def make_model(name):
    config_name, own, (heads, kv_heads) = MODELS[name]
    torch.manual_seed(7)
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = getattr(transformers, config_name)(**SIZES, **counts, **own)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model.to(torch.float32).eval()


def window_of(config, layer):
    """As a user reads it from the configuration: the window of a local layer, None of a global."""
    kinds = getattr(config, "layer_types", None)
    return None if kinds and kinds[layer] == GLOBAL else config.sliding_window


@dataclass
class Oracle:
    """Stands in the place of a model's attention, calls it, and holds ours to its answer."""

    backend: str
    config: object
    eager: object
    keys: dict = field(default_factory=dict)  # by layer: k, v bf16 [n, Hkv, D] of all positions
    calls: int = 0
    hidden: int = 0  # pairs of a query and a key before it that some window hid

    def __call__(self, module, query, key, value, attention_mask, scaling, **options):
        query, key, value = (x.to(torch.bfloat16).to(torch.float32) for x in (query, key, value))
        theirs, weights = self.eager(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        layer, new = module.layer_idx, query.shape[2]
        held = self.keys.setdefault(layer, [rows_of(x[:, :, :0]) for x in (key, value)])
        for i, x in enumerate((key, value)):
            held[i] = np.concatenate([held[i], rows_of(x[:, :, -new:])])
        self.check(module, rows_of(query), held, scaling, theirs)
        return theirs, weights

    def check(self, module, q, held, scaling, theirs):
        window, total = window_of(self.config, module.layer_idx), len(held[0])
        sinks = getattr(module, "sinks", None)
        options = {
            "softmax_scale": scaling,
            "window": window,
            "softcap": getattr(self.config, "attn_logit_softcapping", None) or 0.0,
            "sink": None if sinks is None else sinks.detach().numpy(),
        }
        arrays = (q, *held, ends_of([len(q)]), ends_of([total]))
        out, lse = run_attention(self.backend, arrays, **options)
        expected = expected_attention(*arrays, **options)
        exact = theirs[0].detach().numpy().reshape(expected.out.shape)
        assert np.abs(expected.out - exact).max() < 1e-5 * np.abs(exact).max()
        assert_within_bound(out, lse, expected, f"layer {module.layer_idx} at {total}")
        self.calls += 1
        self.hidden += 0 if window is None else max(total - window, 0)


def rows_of(x):
    """[1, heads, n, D] float32 holding bf16 values -> bf16 [n, heads, D]."""
    return np.ascontiguousarray(x[0].transpose(0, 1).detach().numpy()).astype(BF16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_attention_layers_agree(monkeypatch, fast_backend, name):
    """A prompt of 21 tokens, a chunk of 13 and 30 decode steps, W = 8: the float64 reference agrees
    with each layer's eager attention to 1e-5, and the backend with the reference within the bound;
    keys fell out of the window in all but the first steps."""
    model = make_model(name)
    home = sys.modules[type(model).__module__]
    oracle = Oracle(fast_backend, model.config, home.eager_attention_forward)
    monkeypatch.setattr(home, "eager_attention_forward", oracle)
    cache = transformers.DynamicCache(config=model.config)
    tokens = torch.arange(PROMPT + CHUNK + STEPS)[None] * 31 % SIZES["vocab_size"]
    ends = [PROMPT, PROMPT + CHUNK, *range(PROMPT + CHUNK + 1, tokens.shape[1] + 1)]
    with torch.no_grad():
        for start, end in zip([0, *ends], ends, strict=False):
            model(tokens[:, start:end], past_key_values=cache, use_cache=True)
    assert oracle.calls == SIZES["num_hidden_layers"] * len(ends)
    assert oracle.hidden > STEPS
    assert {len(k) for k, _ in oracle.keys.values()} == {tokens.shape[1]}
