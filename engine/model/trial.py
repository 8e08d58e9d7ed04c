"""Whether a model of transformers can be served: what its layers ask of attention, found by running it on a few tokens.

A closed world, as config.json is for our families. Computed is what the KV cache, the kernels and the scheduler can do;
anything else that a trial sees is an error that says what.

It runs with an attention that mixes no tokens and notes every call. The same tokens, each with its own position, then
come in another order: hidden rows must follow them and be the same, else something but attention carries from token to
token (a convolution, a recurrent state), or positions are not those that were given. Without any given, the model must
count them as we do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from serve_llm.engine.errors import UnsupportedModel
from serve_llm.engine.model.pretrained import Call, Place, attend, logits_of, take_apart

NAME = "serve_llm_trial"  # the same attention; beside it a function that notes what masks hide
LONGEST = 1 << 20  # positions that a mask is looked at for
ORDER = (3, 0, 6, 1, 7, 5, 2, 4)
# Arguments of attention functions that say nothing which is not known otherwise: windows come from the mask.
HARMLESS = frozenset(
    "dropout sliding_window position_ids cache_position use_cache output_attentions output_hidden_states "
    "output_router_logits return_dict position_embeddings layer_idx is_causal".split()
)
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query and key -> seen or not


class _Refusal(Exception):
    """The end of a sentence about the model."""


def note_mask(
    *, mask_function: MaskFunction, q_length: int, kv_length: int, device: torch.device, **_: object
) -> Tensor:
    """transformers' interface of mask functions: (1, 1, queries, keys) int32, each number the window, 0 for none."""
    first = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(LONGEST, device=device)[None, :]

    def seen(queries: list[int]) -> tuple[Tensor, Tensor]:
        at = torch.tensor(queries, device=device)[:, None]
        return mask_function(first, first, at, keys).expand(len(queries), LONGEST), at

    window = int(seen([LONGEST - 1])[0].sum())
    where = {0, 1, window - 1, window, window + 1, 2 * window - 1, 3 * window // 2, LONGEST // 2 - 3, LONGEST - 1}
    found, at = seen(sorted(position for position in where if 0 <= position < LONGEST))
    if not torch.equal(found, (keys <= at) & (keys > at - window)):
        raise _Refusal("its attention mask is neither causal nor a sliding window")
    value = torch.tensor(0 if window == LONGEST else window, dtype=torch.int32, device=device)
    return value.expand(1, 1, q_length, kv_length)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, note_mask)


class _Trial:
    """A step of a few tokens, see `pretrained.Attends`."""

    def __init__(self, max_model_len: int) -> None:
        self.places: dict[nn.Module, Place] = {}
        self._max_model_len = max_model_len

    def attend(self, call: Call) -> Tensor:
        heads, _, head_dim = call.query.shape
        kv_heads = call.key.shape[0]
        if call.module in self.places:
            raise _Refusal("one of its layers computes attention several times for a token")
        if unknown := sorted(name for name, value in call.others.items() if name not in HARMLESS and _says(value)):
            raise _Refusal(f"its attention asks for {', '.join(unknown)}, which our kernels do not know")
        if heads % kv_heads or call.value.shape[0] != kv_heads or call.value.shape[-1] > head_dim:
            shapes = ", ".join(str(list(part.shape)) for part in (call.query, call.key, call.value))
            raise _Refusal(f"its queries, keys and values have shapes that our KV cache does not hold: {shapes}")
        self.places[call.module] = Place(heads, kv_heads, head_dim, self._window(call.mask))
        shared = heads // kv_heads
        key, value = (part.repeat_interleave(shared, 0).float() for part in (call.key, call.value))
        turned = key.roll(1, -1)  # else rotary positions, the same in a token's query and its key, cancelled out
        scores = (call.query.float() * turned).sum(-1, keepdim=True) * call.scale
        return (torch.sigmoid(scores) * value).transpose(0, 1).to(call.query.dtype)

    def _window(self, mask: Tensor | None) -> int | None:
        if mask is None or mask.dtype != torch.int32:
            raise _Refusal("its attention mask is not made by transformers' mask functions")
        window = int(mask.flatten()[0])
        return window if 0 < window < self._max_model_len else None


def _says(value: object) -> bool:
    return value is not None and value is not False


@dataclass(frozen=True)
class Found:
    """A model that can be served: its two halves as of `take_apart`, the modules that call attention, in order, and the
    linear layers that are called, by weak references; others' weights may be read by the code around them."""

    body: PreTrainedModel
    head: PreTrainedModel
    places: Mapping[nn.Module, Place]
    linears: Set[nn.Module]


@torch.inference_mode()
def run_trial(model: PreTrainedModel, vocab_size: int, max_model_len: int) -> Found:
    """model: on its device, with our attention by NAME; it is taken apart.

    Raises UnsupportedModel for a model that cannot be served faithfully.
    """
    try:
        return _find(model, vocab_size, max_model_len)
    except _Refusal as refusal:
        why = str(refusal)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the code of any model can raise
        why = f"its code fails when it is called so: {type(error).__name__}: {' '.join(str(error).split())}"
    raise UnsupportedModel(f"{type(model).__name__} cannot be served by transformers' own code: {why}")


def _find(model: PreTrainedModel, vocab_size: int, max_model_len: int) -> Found:
    device = next(model.parameters()).device
    positions = torch.arange(len(ORDER), device=device)
    ids = (positions * 37 + 3) % vocab_size
    order = torch.tensor(ORDER, device=device)
    linears: WeakSet[nn.Module] = WeakSet()
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [layer.register_forward_hook(lambda called, *_: linears.add(called)) for layer in layers]

    def run(part: PreTrainedModel, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, dict[nn.Module, Place]]:
        step = _Trial(max_model_len)
        one_sequence = torch.ones_like(ids).unsqueeze(0)  # whatever the order of its positions
        given = None if positions is None else positions[None]
        result = part(input_ids=ids[None], position_ids=given, attention_mask=one_sequence, use_cache=False, step=step)
        rows: Tensor = result[0][0]
        return rows, step.places

    logits, _ = run(model, ids, positions)
    body, head = take_apart(model)
    if body is head:
        raise _Refusal("its layers are not apart from its head")
    hidden, places = run(body, ids, positions)
    again, _ = run(body, ids[order], positions[order])
    by_default, _ = run(body, ids, None)
    if not places:
        raise _Refusal("none of its layers calls attention by transformers' interface")
    # A product's rows may differ in their last bits where others stand beside them; a neighbour's influence is larger.
    tolerance = torch.finfo(model.dtype).eps ** 0.5
    if _differ(hidden[order], again, tolerance):
        raise _Refusal(
            "something besides attention carries from token to token (a convolution or recurrent state, which our KV "
            "cache does not hold), or it does not use the positions that it is given"
        )
    if _differ(hidden, by_default, tolerance):
        raise _Refusal("it counts a sequence's positions otherwise than 0, 1, 2, ...")
    if logits.shape[1] != vocab_size or _differ(logits, logits_of(head, hidden), tolerance):
        raise _Refusal("its logits are not made of its last hidden states alone, or not one for each id")
    for hook in hooks:
        hook.remove()
    return Found(body, head, places, linears)


def _differ(left: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool((left.float() - right.float()).norm() > tolerance * left.float().norm())
