"""A Transformer in NumPy with the weights of a checkpoint, as a reference for the analysis."""

import math

import numpy as np
import reference

# Sizes of the toy checkpoints
LAYERS, HEADS = 2, 4


class NumpyTransformer:
    """The forward pass of a post-norm Transformer for one sentence pair."""

    def __init__(self, state, variant):
        self.state = {name: value.double().numpy() for name, value in state.items()}
        self.variant = variant
        self.seen, self.features = {}, {}

    def linear(self, name, x):
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def norm(self, name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def embed(self, tokens):
        weight = self.state.get("encoder.embed_tokens.weight")
        if weight is None:  # a language model
            weight = self.state["decoder.embed_tokens.weight"]
        half = weight.shape[1] // 2
        rates = np.exp(-np.arange(half) * math.log(10000) / (half - 1))
        angles = (np.arange(len(tokens)) + 2)[:, None] * rates  # positions begin after padding's
        waves = np.concatenate([np.sin(angles), np.cos(angles)], 1)
        return math.sqrt(weight.shape[1]) * weight[tokens] + waves

    def parameters(self, kind, layer):
        """The learned scalars of an attention, by the last part of their names."""
        side = "encoder" if kind == "encoder" else "decoder"
        name = "encoder_attn" if kind == "cross" else "self_attn"
        start = f"{side}.layers.{layer}.{name}.normalizer."
        return {
            key.rpartition(".")[2]: value
            for key, value in self.state.items()
            if key.startswith(start)
        }

    def sigma(self, kind, layer, scores, head):
        parameters = self.parameters(kind, layer)
        own = {k: v if v.ndim == 1 else v[head] for k, v in parameters.items()}
        return reference.sigma(
            *(scores, 1 - own["low_coefficient"], 1 + own["high_coefficient"]),
            *(own["low_threshold"], own["high_threshold"]),
        )

    def probs(self, kind, layer, scores, excluded):
        parameters = self.parameters(kind, layer)
        if self.variant.startswith("multimax"):
            mapped = [self.sigma(kind, layer, scores[head], head) for head in range(len(scores))]
            return reference.softmax(mapped, excluded)
        if self.variant == "temperature":
            return reference.softmax(scores / np.exp(parameters["log_temperature"]), excluded)
        if self.variant == "alpha_entmax":
            alphas = 1 + 1 / (1 + np.exp(-parameters["logit"]))
            return np.stack(
                [reference.entmax(s, excluded, a) for s, a in zip(scores, alphas, strict=True)]
            )
        if self.variant == "topk":
            return reference.topk(scores, excluded, 3)
        return getattr(reference, self.variant)(scores, excluded)

    def attend(self, kind, layer, name, x, memory, excluded):
        def heads(projection, values):
            split = self.linear(f"{name}.{projection}", values).reshape(len(values), HEADS, -1)
            return split.transpose(1, 0, 2)

        query, key, value = heads("q_proj", x), heads("k_proj", memory), heads("v_proj", memory)
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1])
        probs = self.probs(kind, layer, scores, excluded)
        self.seen[kind, layer] = scores, probs, excluded
        mixed = (probs @ value).transpose(1, 0, 2).reshape(len(x), -1)
        return self.linear(f"{name}.out_proj", mixed)

    def feed_forward(self, name, x):
        return self.linear(f"{name}.fc2", np.maximum(self.linear(f"{name}.fc1", x), 0))

    def run(self, source, target):
        x = self.embed(source)
        everything = np.zeros((len(source), len(source)), bool)
        for layer in range(LAYERS):
            at = f"encoder.layers.{layer}"
            y = self.attend("encoder", layer, f"{at}.self_attn", x, x, everything)
            x = self.norm(f"{at}.self_attn_layer_norm", x + y)
            x = self.norm(f"{at}.final_layer_norm", x + self.feed_forward(at, x))
            self.features["encoder", layer] = x
        memory, x = x, self.embed(target)
        future = np.triu(np.ones((len(target), len(target)), bool), 1)
        for layer in range(LAYERS):
            at = f"decoder.layers.{layer}"
            y = self.attend("decoder", layer, f"{at}.self_attn", x, x, future)
            x = self.norm(f"{at}.self_attn_layer_norm", x + y)
            nothing = np.zeros((len(target), len(source)), bool)
            y = self.attend("cross", layer, f"{at}.encoder_attn", x, memory, nothing)
            x = self.norm(f"{at}.encoder_attn_layer_norm", x + y)
            x = self.norm(f"{at}.final_layer_norm", x + self.feed_forward(at, x))
            self.features["decoder", layer] = x
        return self.seen
