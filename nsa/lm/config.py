"""Configuration of the decoder language model."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from nsa.config import NSAConfig
from nsa.errors import (
    UserError,
    check,
    check_at_most,
    check_positive,
    fail,
    nearest,
    nearest_hint,
)
from nsa.fields import settle

_CHANGEABLE = ("attention", *(entry.name for entry in fields(NSAConfig)))


@dataclass(frozen=True)
class LMConfig:
    """A decoder language model: RMSNorm, rotary positions, NSA or dense attention, an MLP.

    Attributes:
        vocab_size: tokens in the vocabulary.
        width: size of the residual stream.
        num_layers: decoder layers.
        attention: ``nsa``, or ``dense`` for causal softmax attention through PyTorch's SDPA.
        nsa: the sparse pattern; ``dense`` uses its heads, head sizes and rotary settings.
        layers: changes for some layers: ``attention`` or fields of ``nsa``, by the index of a layer
            (from 0) or a range such as ``4-7``, both ends included; or a list with one entry per
            layer, which may be empty. For example ``{0: {attention: dense}, 4-7: {window_size:
            128}}``. See :meth:`layer`.
        mlp: ``silu`` (two matrices) or ``swiglu`` (three; Shazeer, arXiv:2002.05202).
        mlp_hidden_size: hidden size of the MLP.
        tie_head: whether the output head is the embedding matrix.
        norm_eps: constant inside RMSNorm.
        init_std: standard deviation of the initial weights; divided by sqrt(2 * num_layers) for
            output projections, and smaller for the head of a wide model, so that the first loss is
            near ln(vocab_size).
    """

    vocab_size: int = 256
    width: int = 768
    num_layers: int = 12
    attention: Literal["nsa", "dense"] = "nsa"
    nsa: NSAConfig = field(default_factory=NSAConfig)
    layers: dict[Any, dict[str, Any]] | None = field(default=None, hash=False)
    mlp: Literal["silu", "swiglu"] = "silu"
    mlp_hidden_size: int = 3072
    tie_head: bool = False
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        settle(self)
        # Larger sizes are mistakes, and their products would overflow 64 bits.
        check_at_most(self, 2**24, "vocab_size", "width", "mlp_hidden_size")
        check_at_most(self, 1000, "num_layers")
        check_positive(self, "vocab_size", "width", "num_layers", "mlp_hidden_size")
        check_positive(self, "norm_eps", "init_std")
        object.__setattr__(self, "layers", self._settled_layers())

    def _settled_layers(self) -> dict[str, dict[str, Any]] | None:
        """Changes by layer or range, with the types of the fields; None without changes."""
        given: Any = self.layers
        if isinstance(given, list | tuple):
            rule = f"have one entry for each of the {self.num_layers} layers"
            check(len(given) == self.num_layers, "layers", rule, len(given))
            given = dict(enumerate(given))
        rule = "be a list, or a mapping from layers to changes"
        check(isinstance(given, Mapping | None), "layers", rule, repr(given))
        found, owners = dict[str, dict[str, Any]](), dict[int, str]()
        for key, changes in (given or {}).items():
            name = f"layers.{key}"
            for index in _indices(str(key), self.num_layers):
                rule = f"be given once for layer {index}"
                check(index not in owners, "layers", rule, f"{owners.get(index)} and {key}")
                owners[index] = str(key)
            check(isinstance(changes, Mapping), name, "be a mapping of changes", repr(changes))
            for changed in changes:
                hint = nearest_hint(nearest(str(changed), _CHANGEABLE))
                rule = "contain only attention and fields of NSAConfig"
                check(changed in _CHANGEABLE, name, rule, changed, hint)
            try:
                one = self._changed(changes)
            except UserError as error:
                argument = f"{name}.{error.argument}"
                raise UserError(argument, error.rule, error.value, error.hint) from None
            if changes:
                found[str(key)] = {
                    changed: getattr(one if changed == "attention" else one.nsa, changed)
                    for changed in changes
                }
        return found or None

    def _changed(self, changes: Mapping[str, Any]) -> LMConfig:
        pattern = {name: value for name, value in changes.items() if name != "attention"}
        return replace(
            self,
            attention=changes.get("attention", self.attention),
            nsa=replace(self.nsa, **pattern),
            layers=None,
        )

    def _entry(self, index: int) -> tuple[str, dict[str, Any]]:
        """Key and changes of a layer; empty without changes."""
        entries = (self.layers or {}).items()
        return next((x for x in entries if index in _indices(x[0], self.num_layers)), ("", {}))

    def layer(self, index: int) -> LMConfig:
        """Return the model in which all layers are like layer ``index``, from 0.

        Its ``attention`` is that of the layer, its ``nsa`` the pattern of the layer, see
        :meth:`nsa.NSAConfig.for_layer`, and its ``layers`` None.
        """
        one = self._changed(self._entry(index)[1])
        return replace(one, nsa=one.nsa.for_layer(index))

    @property
    def has_index(self) -> bool:
        """Whether a layer has scores ``index``."""
        return bool(self.index_layers)

    @functools.cached_property
    def index_layers(self) -> dict[int, int]:
        """KV heads of each layer with scores ``index``, by the index of the layer."""
        kinds = [kind for kind in self.kinds if kind.attention == "nsa" and kind.nsa.has_index]
        found = {n: kind.nsa.num_kv_heads for kind in kinds for n in self.kinds[kind]}
        return dict(sorted(found.items()))

    @functools.cached_property
    def kinds(self) -> dict[LMConfig, list[int]]:
        """Indices of equal layers, by :meth:`layer`."""
        found = dict[LMConfig, list[int]]()
        for index in range(self.num_layers):
            found.setdefault(self.layer(index), []).append(index)
        return found

    @property
    def attention_kind(self) -> str:
        """``nsa`` or ``dense`` if all layers have this attention, otherwise ``mixed``."""
        found = {kind.attention for kind in self.kinds}
        return found.pop() if len(found) == 1 else "mixed"

    def sample(self, count: int) -> LMConfig:
        """Return the model with its first ``count`` layers and one layer of each of ``layers``."""
        first = {self._entry(n)[0]: n for n in reversed(range(self.num_layers))}
        taken = sorted({*first.values(), *range(min(count, self.num_layers))})
        changes: Any = [self._entry(n)[1] for n in taken]
        return replace(self, num_layers=len(taken), layers=changes)


def _indices(key: str, num_layers: int) -> range:
    """Layers of a key of ``layers``: ``3`` or ``4-7``."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", key)
    last = num_layers - 1
    rule = f"have layers from 0 to {last} as keys, such as 0 or 0-{last}"
    if found is not None:
        first, end = int(found[1]), int(found[2] or found[1])
        if first <= end <= last:
            return range(first, end + 1)
    fail("layers", rule, key)
