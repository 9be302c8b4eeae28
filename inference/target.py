"""The frozen target, seen as (final state, tapped features, logits) over a slot cache. Any transformers causal LM, unmodified.

ids ─► extend: slots, positions, mask ─► forward: the decoder (no lm_head), taps by hooks ─► final_BTD, features_BTF ─► logits

Tree verification needs nothing from the model but what transformers gives: explicit position ids (length + depth), a 4D mask (ancestors), and
a cache of our own. A family with a recurrent state cannot: there is no per-token state to mask or to move.

Shape suffixes: B rows, T new tokens, S slots of the view, D hidden, F feature width, V vocabulary, N tree nodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.heads.checkpoint import Adapter
from draftheads.heads.tree import DraftTree
from draftheads.inference import attention, sources
from draftheads.inference.adapter import tune
from draftheads.inference.cache import SlotCache
from draftheads.inference.graphs import Graphs
from draftheads.inference.packed import can_pack, pack_linears
from draftheads.inference.taps import Tapped, Taps
from draftheads.recipes.schema import Geometry, RecipeError, TargetSection


class Target:
    """Make one with `Target.load` or `Target.from_model`. All methods run without gradients.

    embed_VD, lm_head_VD: the original (unpacked) weights; lm_head's rows may exceed the tokenizer's ids.
    finish_logits: what the family does after lm_head (softcap, scale), elementwise: for callers that need only some of its rows.
    attention: the implementation that its forwards select, None for the model's own; window: of its sliding layers, or None.
    adapter: what was merged into its weights, None for a model as published; a head and its target have the same.
    decoder, layers: transformers' modules. graphs: its captured steps (CUDA only). eos_ids: every id that ends an answer.
    template_hash: of chat template and special tokens, 16 hex digits.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, revision: str | None, packed: bool, adapter: Adapter | None = None) -> None:
        self.model = model.eval()
        self.adapter = adapter
        self.tokenizer = tokenizer
        self.name, self.revision = name, revision
        self.config = model.config.get_text_config(decoder=True)
        places = {str(d) for d in (getattr(model, "hf_device_map", None) or {}).values()} - {"cpu", "disk"}
        if len(places) > 1:
            raise RecipeError(f"{name} is spread over {', '.join(sorted(places))}: the decoder keeps its cache on one accelerator; load it on one, "
                              "or offload what does not fit (device_map with cpu or disk)")
        sources.check_family(self.config, type(model), name)
        self.decoder: nn.Module = model.get_decoder()
        self.embed_VD: Tensor = model.get_input_embeddings().weight.detach()
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.lm_head_VD: Tensor = self.lm_head.weight.detach()
        self.device, self.dtype = self.embed_VD.device, self.embed_VD.dtype
        self.geometry = sources.geometry_of(self.config, self.lm_head_VD.shape[0])
        self.eos_ids = sources.eos_ids(model, tokenizer)
        self.template_hash = sources.template_hash(tokenizer)
        self._layers = _layers(self.decoder, self.geometry.num_layers, name)
        self._cache_argument = _cache_argument(self.decoder, name)
        self.attention, self._eager = _attention_kind(model, self.config)
        self._groups = self.geometry.num_heads // self.geometry.num_kv_heads
        self._layer_types, self.window = _layer_types(self.config)
        self.graphs = Graphs(self.device)
        self.finish_logits = _self_check(self)
        self.packed = packed
        if packed:
            self._pack()

    @classmethod
    def load(
        cls,
        name: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: torch.device | str | None = None,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        geometry: Geometry | None = None,
        packed: bool | str = "auto",
        adapter: Adapter | None = None,
    ) -> Target:
        """A named target ("smollm2-135m"), Hub id, folder or .gguf file. RecipeError, one line naming the cure, when that fails.

        dtype "auto": bfloat16 on CUDA, float32 on a CPU. packed "auto": packed weights for float32 on a CPU. geometry: the recipe's; a target
        that differs is an error. chat_template: path of a jinja file, for a tokenizer without one. adapter: merged into the weights
        (heads.checkpoint.adapter_of); a folder of `specdec export --target-out` has its own merged already.
        """
        where = _device(device)
        kind = getattr(torch, dtype) if dtype != "auto" else torch.bfloat16 if where.type == "cuda" else torch.float32
        source = sources.locate(name, revision)
        model, tokenizer, revision = sources.load(source, kind, where, trust_remote_code, geometry)
        sources.set_chat_template(tokenizer, chat_template)
        model.requires_grad_(False)
        merged = tune(model, source, adapter)
        pack = where.type == "cpu" and kind == torch.float32 and can_pack() if packed == "auto" else bool(packed)
        return cls(model, tokenizer, name, revision, pack, merged)

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any, *, name: str = "in-memory", packed: bool = False, chat_template: str | None = None) -> Target:
        """A model already in memory, used in place. packed=True replaces its linear layers."""
        if chat_template is not None:
            sources.set_chat_template(tokenizer, chat_template)
        return cls(model, tokenizer, name, None, packed)

    @property
    def layers(self) -> nn.ModuleList:
        return self._layers

    def _pack(self) -> None:
        probe_1T = torch.arange(4, device=self.device)[None] % self.lm_head_VD.shape[0]
        row = slice(0, 1)
        expected_1TV = self.logits(self.extend(self.new_cache(1, 8), row, probe_1T)[0])
        pack_linears(self.model, lambda: self.extend(self.new_cache(1, 8), row, probe_1T))
        self.lm_head = self.model.get_output_embeddings()
        off = (self.logits(self.extend(self.new_cache(1, 8), row, probe_1T)[0]) - expected_1TV).abs().max()
        if not off <= 1e-3 * expected_1TV.abs().max():
            raise RecipeError(f"{self.name}: packed weights change the logits by {off:.1e}: load it with packed=False")

    def new_cache(self, batch: int, max_len: int) -> SlotCache:
        return SlotCache(batch, max_len, self.device)

    def extend(
        self, cache: SlotCache, rows: slice, ids_BT: Tensor, *, tree: DraftTree | None = None, taps: Taps = (), view: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Feed T new tokens a row at slots lengths[b] … lengths[b]+T−1; nothing is committed. -> final_BTD, features_BTF (None without taps).

        tree None: causal. Otherwise ids_BT are the tree's tokens: position = length + depth, and a node sees its ancestors only.
        Right padding is allowed: the padded tokens' results are garbage, and so is what they wrote behind the tokens that are committed.
        view: read that many slots and go by the device's lengths alone, so that the same operations serve every round (a captured step).
        """
        T = ids_BT.shape[1]
        start_B = cache.lengths_B[rows]
        starts = cache.lengths[rows]
        if tree is not None and T > 1 and not (tree.chained if view is not None else _is_chain(tree)):
            block_BTT = tree.ancestors_BNN()
            positions_BT = start_B[:, None] + block_BTT.sum(-1) - 1
        else:
            block_BTT = None
            positions_BT = start_B[:, None] + torch.arange(T, device=self.device)
        if view is not None:
            return self.forward(ids_BT, positions_BT, attention.block_mask(start_B, view, block_BTT, T), cache, rows, start_B, taps)
        mask_BTS = None
        if block_BTT is not None or not self.unmasked(starts, T, self.window):
            mask_BTS = attention.block_mask(start_B, cache.view(max(starts) + T), block_BTT, T)
        return self.forward(ids_BT, positions_BT, mask_BTS, cache, rows, starts, taps)

    def forward(
        self, ids_BT: Tensor, positions_BT: Tensor, mask_BTS: Tensor | None, cache: SlotCache, rows: slice, starts: list[int] | Tensor,
        taps: Taps = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Low level: write the tokens at slots starts[b] …, attend by mask_BTS (bool; S slots are read), window added for sliding layers.

        mask_BTS None: one token that sees every slot before it, or plain causal attention from slot 0 (equal rows only). starts as a tensor:
        the host does not look at them.
        """
        T = ids_BT.shape[1]
        # Padding may lie beyond the last position, where learned tables end.
        positions_BT = positions_BT.clamp(max=self.geometry.max_positions - 1)
        if mask_BTS is None:
            assert isinstance(starts, list)
            cache.prepare(rows, starts, T, starts[0] + T)
        else:
            cache.prepare(rows, starts, T, mask_BTS.shape[2])
        named: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        with torch.inference_mode(), attention.use_attention(self.config, self.attention), Tapped(self._layers, taps) as tapped:
            mask = self._masks(mask_BTS, positions_BT, starts)
            final_BTD = self.decoder(input_ids=ids_BT, attention_mask=mask, position_ids=positions_BT, **named).last_hidden_state
            features_BTF = tapped.features(final_BTD)
        if not torch.is_inference_mode_enabled():  # ordinary tensors for callers that train on them
            final_BTD, features_BTF = final_BTD.clone(), None if features_BTF is None else features_BTF.clone()
        return final_BTD, features_BTF

    def logits(self, final: Tensor) -> Tensor:
        """float32 [..., V] from the post-norm state [..., D]: lm_head and what the family does after it (checked when the target was made)."""
        with torch.no_grad():
            return self.finish_logits(self.lm_head(final).float())

    def unmasked(self, starts: list[int], T: int, window: int | None) -> bool:
        """Whether T causal tokens a row need no mask: rows equally long, one token or a prompt, no window that is full, and our own attention."""
        plain = min(starts) == max(starts) and (T == 1 or starts[0] == 0) and (window is None or starts[0] + T <= window)
        return plain and self.attention == attention.NAME

    def shaped_mask(self, mask_BTS: Tensor, positions_BT: Tensor, start_B: Tensor, window: int | None) -> Tensor:
        """bool [B,T,S] -> the 4D mask that this model's attention takes; `window` of the layers it is for."""
        if window is not None:
            mask_BTS = attention.window_mask(mask_BTS, positions_BT, start_B, window)
        if self.attention == attention.NAME:
            return attention.fold_mask(mask_BTS, self._groups, self.dtype)
        return (attention.float_mask(mask_BTS, self.dtype) if self._eager else mask_BTS)[:, None]

    def _masks(self, mask_BTS: Tensor | None, positions_BT: Tensor, starts: list[int] | Tensor) -> Any:
        """What the family's decoder takes as attention_mask: one 4D mask, or a dict by layer type where layers differ."""
        by_type: dict[str, Tensor | None] = {}
        start_B = torch.tensor(starts, device=self.device) if isinstance(starts, list) and self.window is not None else starts
        for kind in self._layer_types:
            window = self.window if kind == "sliding_attention" else None
            by_type[kind] = None if mask_BTS is None else self.shaped_mask(mask_BTS, positions_BT, start_B, window)  # type: ignore[arg-type]
        return by_type if len(by_type) > 1 else next(iter(by_type.values()))


def load_target(
    section: TargetSection, adapter: Adapter | None = None, *, device: torch.device | str | None = None, packed: bool | str = "auto"
) -> Target:
    """A recipe's target as its section says. adapter: the checkpoint's, without which its target is not the one that the head was trained for."""
    return Target.load(
        section.name, revision=section.revision, dtype=section.dtype, device=device, trust_remote_code=section.trust_remote_code,
        chat_template=section.chat_template, geometry=section.geometry, adapter=adapter, packed=packed,
    )


def _is_chain(tree: DraftTree) -> bool:
    """Chains are by far the most frequent trees, and need no ancestor matrix."""
    if tree.chained:
        return True
    N = tree.width
    return bool((tree.parents_BN == torch.arange(-1, N - 1, device=tree.parents_BN.device)).all())


def _device(name: torch.device | str | None) -> torch.device:
    """The named device, by default a GPU if there is one. RecipeError where it is not here."""
    try:
        found = torch.device(name if name is not None else "cuda" if torch.cuda.is_available() else "cpu")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # an unknown name; torch without CUDA; a GPU that is not there
        raise RecipeError(f"device {name}: {' '.join(str(error).split())[:200]}") from None
    return found


def _layers(decoder: nn.Module, count: int, name: str) -> nn.ModuleList:
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise RecipeError(f"{name}: {type(decoder).__name__} has no list of {count} decoder layers; {sources.SUPPORTED}")


def _cache_argument(decoder: nn.Module, name: str) -> str:
    """transformers 5.24 renamed past_key_values to cache."""
    parameters = inspect.signature(decoder.forward).parameters
    if "position_ids" not in parameters:
        raise RecipeError(f"{name}: {type(decoder).__name__} takes no position_ids, so it cannot verify trees; {sources.SUPPORTED}")
    return "cache" if "cache" in parameters else "past_key_values"


def _attention_kind(model: Any, config: Any) -> tuple[str | None, bool]:
    """(attention implementation to select for our forwards or None for the model's own, whether its masks must be float)."""
    if not getattr(model, "_supports_sdpa", False) or getattr(config, "attn_logit_softcapping", None):
        # For the model's own forward too: some transformers versions let sdpa drop the softcap, and then the model is not itself.
        model.set_attn_implementation("eager")
        return "eager", True
    if getattr(model, "_supports_attention_backend", False):
        return attention.NAME, False
    return "sdpa", False


def _layer_types(config: Any) -> tuple[list[str], int | None]:
    """The kinds of layers this model has, sorted, and the window of the sliding ones."""
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else ["full_attention"])))
    return kinds, window if "sliding_attention" in kinds else None


@torch.no_grad()
def _self_check(target: Target) -> Callable[[Tensor], Tensor]:
    """Find what the family does after lm_head, then compare one small tree with the model's own sequential forward.

    Catches wrong scales, families whose attention ignores the mask or the positions (ALiBi, …), and caches that a layer bypasses.
    """
    V = target.lm_head_VD.shape[0]
    # Prompt of 4, then the tree root a, children b and c, d below c: two sequences.
    prompt, (a, b, c, d) = [(17 * i + 5) % V for i in range(4)], [(29 * i + 11) % V for i in range(4)]
    ids_2T = torch.tensor([[*prompt, a, c, d], [*prompt, a, b, b]], device=target.device)
    finals: list[Tensor] = []
    handle = target.decoder.register_forward_hook(lambda module, inputs, output: finals.append(output.last_hidden_state))
    try:
        expected_2TV = target.model(input_ids=ids_2T, use_cache=False).logits.float()
    finally:
        handle.remove()
    tolerance = (1e-3 if target.dtype == torch.float32 else 0.1) * expected_2TV.abs().max().item() + 1e-6
    raw_2TV = target.lm_head(finals[0]).float()
    shapes = [shape for shape in _logit_shapes(target.model, target.config) if (shape(raw_2TV) - expected_2TV).abs().max() <= tolerance]
    if not shapes:
        raise RecipeError(f"{target.name}: its logits are not lm_head of the last state, softcapped or scaled; {sources.SUPPORTED}")
    cache = target.new_cache(1, 64)
    row = slice(0, 1)
    target.extend(cache, row, ids_2T[:1, :4])
    cache.advance(row, [4])
    tokens_1N = torch.tensor([[a, b, c, d]], device=target.device)
    parents_1N = torch.tensor([[-1, 0, 0, 2]], device=target.device)
    final_1ND, _ = target.extend(cache, row, tokens_1N, tree=DraftTree(tokens_1N, parents_1N, torch.ones_like(tokens_1N, dtype=torch.bool)))
    found_NV = shapes[0](target.lm_head(final_1ND).float())[0]
    wanted_NV = torch.stack([expected_2TV[0, 4], expected_2TV[1, 5], expected_2TV[0, 5], expected_2TV[0, 6]])
    off = (found_NV - wanted_NV).abs().max().item()
    if not off <= tolerance or len(cache.keys) != target.geometry.num_layers:
        raise RecipeError(f"{target.name}: a tree forward differs from a sequential one by {off:.1e}, so it cannot be verified; {sources.SUPPORTED}")
    return shapes[0]


def _logit_shapes(model: Any, config: Any) -> list[Callable[[Tensor], Tensor]]:
    """Candidates for what follows lm_head; the check picks the first that fits (two families scale by the same key in opposite ways)."""
    cap = getattr(config, "final_logit_softcapping", None)
    scales = [1.0]
    for key in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(config, key, None)
        if isinstance(value, int | float) and value not in (0, 1):
            scales += [float(value), 1.0 / float(value)]

    def shape(scale: float) -> Callable[[Tensor], Tensor]:
        def apply(logits: Tensor) -> Tensor:
            if scale != 1.0:
                logits = logits * scale
            return torch.tanh(logits / cap) * cap if cap else logits

        return apply

    return [shape(scale) for scale in scales]
