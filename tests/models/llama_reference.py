"""A NumPy Llama as an independent reference, and a runner that decodes with models from build_llama."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from ortolan.models.llama_config import LlamaConfig


class Decoder:
    """Runs a model and keeps its cache between calls."""

    def __init__(self, model: ir.Model, config: LlamaConfig, batch: int = 1):
        self.session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
        shape = (batch, config.num_key_value_heads, 0, config.head_size)
        self.past = {
            f"past_key_values.{layer}.{part}": np.zeros(shape, np.float32)
            for layer in range(config.num_hidden_layers)
            for part in ("key", "value")
        }
        self.mask = np.ones((batch, 0), np.int64)

    def step(self, ids: np.ndarray, mask: np.ndarray | None = None, positions: np.ndarray | None = None) -> np.ndarray:
        start = self.mask.shape[1]
        self.mask = np.concatenate([self.mask, np.ones_like(ids) if mask is None else mask], axis=1)
        if positions is None:
            positions = np.broadcast_to(np.arange(start, self.mask.shape[1]), ids.shape)
        feeds = {"input_ids": ids, "attention_mask": self.mask, "position_ids": positions, **self.past}
        feeds = {value.name: feeds[value.name] for value in self.session.get_inputs()}
        names = ["logits", *(name.replace("past_key_values", "present") for name in self.past)]
        logits, *present = self.session.run(names, feeds)
        self.past = dict(zip(self.past, present, strict=True))
        return logits


def reference_llama(w: dict[str, np.ndarray], config: LlamaConfig, ids: np.ndarray) -> np.ndarray:
    """Return the logits of one sequence, computed in float64 one head at a time.

    Rotary embedding multiplies complex numbers.
    """
    w = {name: array.astype(np.float64) for name, array in w.items()}
    size, turns = config.head_size, config.rotary_size
    scale = 1 / np.sqrt(size) if config.attention_scale is None else config.attention_scale
    distance = np.arange(len(ids))[:, None] - np.arange(len(ids))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * w[name]

    def rotate(x, layer):
        if layer in config.no_rope_layers:
            return x
        is_local = config.local_rope_theta is not None and config.windows[layer]
        theta, factors = (config.local_rope_theta, None) if is_local else (config.rope_theta, config.rope_factors)
        angles = np.arange(len(ids))[:, None] * theta ** (-np.arange(0, turns, 2) / turns) / np.array(factors or [1.0])
        out, distance = x.copy(), turns // 2 if config.rope_style == "partial" else size // 2
        pairs = (
            (slice(0, turns, 2), slice(1, turns, 2))
            if config.rope_style == "interleaved"
            else (slice(None, turns // 2), slice(distance, distance + turns // 2))
        )
        turned = (x[:, pairs[0]] + 1j * x[:, pairs[1]]) * config.rope_magnitude * np.exp(1j * angles)
        out[:, pairs[0]], out[:, pairs[1]] = turned.real, turned.imag
        return out

    def capped(x, most):
        return most * np.tanh(x / most) if most else x

    def added(x, name):
        return config.residual_scale * (norm(x, name) if config.sandwich_norms else x)

    def project(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def heads(x, name):
        split = project(x, f"{name}_proj").reshape(len(ids), -1, size)
        return (norm(split, f"{name}_norm.weight") if f"{name}_norm.weight" in w else split).swapaxes(0, 1)

    def act(x):
        if config.activation == "silu":
            return x / (1 + np.exp(-x))
        return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2

    def mlp(h, gate, up, down, biases=(0, 0, 0)):
        gate, up = h @ gate.T + biases[0], h @ up.T + biases[1]
        if config.swiglu_limit is None:
            return (act(gate) * up) @ down.T + biases[2]
        gate, up = np.minimum(gate, config.swiglu_limit), np.clip(up, -config.swiglu_limit, config.swiglu_limit)
        return (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)) @ down.T + biases[2]

    def mixture(h, p):
        logits = project(h, f"{p}.gate")
        out = np.zeros_like(h)
        for token, row in enumerate(logits):
            chosen = np.argsort(-row)[: config.num_experts_per_tok]
            weights = np.exp(row[chosen] - row.max())
            for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
                names = [f"{p}.experts.{part}_proj" for part in ("gate", "up", "down")]
                biases = [w[f"{name}.bias"][expert] if config.expert_bias else 0 for name in names]
                out[token] += weight * mlp(h[token], *(w[f"{name}.weight"][expert] for name in names), biases)
        return out

    x = w["model.embed_tokens.weight"][ids] * config.embedding_scale
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}"
        h = norm(x, f"{p}.input_layernorm.weight")
        q, k, v = (heads(h, f"{p}.self_attn.{name}") for name in "qkv")
        group = config.num_attention_heads // config.num_key_value_heads
        contexts = []
        for head in range(config.num_attention_heads):
            scores = capped(
                rotate(q[head], layer) @ rotate(k[head // group], layer).T * scale, config.attention_softcap
            )
            window = config.windows[layer] if config.windows else 0
            scores[(distance < 0) | (distance >= (window or len(ids)))] = -np.inf
            if config.attention_sinks:  # a further score without a value
                sink = np.full((len(ids), 1), w[f"{p}.self_attn.sinks"][head])
                scores = np.concatenate([scores, sink], axis=1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            contexts.append(weights[:, : len(ids)] @ v[head // group])
        attended = project(np.concatenate(contexts, axis=1), f"{p}.self_attn.o_proj")
        x = x + added(attended, f"{p}.post_attention_layernorm.weight")
        before = "pre_feedforward" if config.sandwich_norms else "post_attention"
        h = norm(x, f"{p}.{before}_layernorm.weight")
        if config.num_experts:
            delta = mixture(h, f"{p}.mlp")
        else:
            delta = mlp(h, *(w[f"{p}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
        x = x + added(delta, f"{p}.post_feedforward_layernorm.weight")
    head = w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return capped(norm(x, "model.norm.weight") @ head.T * config.logit_scale, config.logit_softcap)
