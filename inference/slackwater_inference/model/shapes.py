"""Names and shapes of a DualAR's weights in the S2 layout.

Owns what a checkpoint must hold, without torch: `slackwater engine plan` counts bytes and loads nothing.  Called by
`weights`, `folder` and `budget`.
"""

from collections.abc import Container, Iterable, Mapping

from slackwater_inference.config import TransformerConfig

Shape = tuple[int, ...]
SLOW = "text_model.model."
FAST = "audio_decoder."

# The optional audio encoder (for understanding speech) and its projector: speaking needs neither.
IGNORED_PREFIXES = ("audio_encoder.", "audio_projector.")


def weight_shapes(slow: TransformerConfig, fast: TransformerConfig, num_codebooks: int) -> dict[str, Shape]:
    """Every tensor of the two transformers, by its S2 name."""
    shapes: dict[str, Shape] = {f"{SLOW}embeddings.weight": (slow.vocab_size, slow.dim)}
    shapes |= _layer_shapes(SLOW, slow)
    shapes[f"{SLOW}norm.weight"] = (slow.dim,)
    # The codes' embeddings are added to the slow part's input, so they have its width.
    shapes[f"{FAST}codebook_embeddings.weight"] = (num_codebooks * fast.vocab_size, slow.dim)
    if slow.dim != fast.dim:
        shapes[f"{FAST}project_in.weight"] = (fast.dim, slow.dim)
        shapes[f"{FAST}project_in.bias"] = (fast.dim,)
    shapes[f"{FAST}embeddings.weight"] = (fast.vocab_size, fast.dim)
    shapes |= _layer_shapes(FAST, fast)
    shapes[f"{FAST}norm.weight"] = (fast.dim,)
    shapes[f"{FAST}output.weight"] = (fast.vocab_size, fast.dim)
    return shapes


def _layer_shapes(prefix: str, config: TransformerConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    q_width, kv_width = config.n_head * config.head_dim, config.n_local_heads * config.head_dim
    for i in range(config.n_layer):
        layer = f"{prefix}layers.{i}."
        shapes[f"{layer}attention.wqkv.weight"] = (q_width + 2 * kv_width, config.dim)
        shapes[f"{layer}attention.wo.weight"] = (config.dim, q_width)
        if config.attention_qk_norm:
            shapes[f"{layer}attention.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}attention.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}attention_norm.weight"] = (config.dim,)
        shapes[f"{layer}ffn_norm.weight"] = (config.dim,)
        shapes[f"{layer}feed_forward.w1.weight"] = (config.intermediate_size, config.dim)
        shapes[f"{layer}feed_forward.w3.weight"] = (config.intermediate_size, config.dim)
        shapes[f"{layer}feed_forward.w2.weight"] = (config.dim, config.intermediate_size)
    return shapes


def split_name(name: str) -> tuple[str, str, str] | None:
    """The three names under which older checkpoints hold `name`, queries first; None if it is no joined projection."""
    stem, is_joined, tail = name.partition("attention.wqkv.")
    if not is_joined:
        return None
    return f"{stem}attention.wq.{tail}", f"{stem}attention.wk.{tail}", f"{stem}attention.wv.{tail}"


def stored_names(name: str, names: Container[str]) -> tuple[str, ...]:
    """Under what names a file that holds `names` has the weight `name`: its own, or those of its three parts."""
    split = split_name(name)
    return split if split is not None and name not in names and split[0] in names else (name,)


def stored_shapes(
    slow: TransformerConfig, fast: TransformerConfig, num_codebooks: int, names: Iterable[str]
) -> dict[str, Shape]:
    """What a file that holds `names` must hold: `weight_shapes`, with wq, wk and wv where it has a wq for a wqkv."""
    present = set(names)
    shapes: dict[str, Shape] = {}
    for name, shape in weight_shapes(slow, fast, num_codebooks).items():
        split = stored_names(name, present)
        if split == (name,):
            shapes[name] = shape
            continue
        config = slow if name.startswith(SLOW) else fast
        kv_width = config.n_local_heads * config.head_dim
        for part, width in zip(split, (shape[0] - 2 * kv_width, kv_width, kv_width), strict=True):
            shapes[part] = (width, shape[1])
    return shapes


def shape_faults(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> list[str]:
    """One line for each tensor that is missing, extra or of a wrong shape, sorted."""
    faults = [f"missing {name}" for name in expected.keys() - found.keys()]
    faults += [f"extra {name}" for name in found.keys() - expected.keys()]
    faults += [
        f"{name} must be {list(shape)}, got {list(found[name])}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    return sorted(faults)
