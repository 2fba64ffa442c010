"""Configuration of a language model in transformers."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from transformers import PretrainedConfig

from nsa.errors import check
from nsa.lm.config import LMConfig

# Class of each Auto class, saved with the weights for `trust_remote_code=True`.
_AUTO_MAP = {
    "AutoConfig": "NSALMConfig",
    "AutoModel": "NSAModel",
    "AutoModelForCausalLM": "NSAForCausalLM",
    "AutoModelForSequenceClassification": "NSAForSequenceClassification",
    "AutoModelForTokenClassification": "NSAForTokenClassification",
}
CODE_FILE = "nsa_hf.py"
CODE = f'''"""The classes of this model: those of the package nsa, which must be installed."""

from nsa.hf import {", ".join(sorted(_AUTO_MAP.values()))}

__all__ = {sorted(_AUTO_MAP.values())}
'''


class NSALMConfig(PretrainedConfig):
    """:class:`nsa.lm.config.LMConfig` in transformers' form, under the same names.

    The usual names of sizes are aliases: ``hidden_size``, ``num_hidden_layers``,
    ``intermediate_size``, ``tie_word_embeddings``, ``num_attention_heads``,
    ``num_key_value_heads``, ``head_dim``.

    Args:
        max_position_embeddings: sequence length of the training, tokens; informational, since
            rotary positions have no limit.
        index_weight: factor on the loss that trains the index of layers with scores ``index`` (see
            :func:`nsa.index_loss`) in training mode: :class:`NSAForCausalLM` adds it to its loss,
            and :class:`NSAModel` adds its gradient to that of a loss computed elsewhere. 0 leaves
            it out.
        values: fields of ``LMConfig`` (``nsa`` may be a dictionary of the fields of ``NSAConfig``)
            and of ``PretrainedConfig``.

    Raises:
        ValueError: a value is not valid, or ``nsa`` has an unknown field.
    """

    model_type = "nsa_lm"
    attribute_map = {  # noqa: RUF012 (transformers reads it from the class)
        "hidden_size": "width",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "mlp_hidden_size",
        "tie_word_embeddings": "tie_head",
    }
    layers = None  # not in config.json if all layers are alike
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self, *, max_position_embeddings: int = 2048, index_weight: float = 1.0, **values: Any
    ) -> None:
        check(index_weight >= 0, "index_weight", "be at least 0", index_weight)
        values = {self.attribute_map.get(name, name): value for name, value in values.items()}
        given = {f.name: values.pop(f.name) for f in fields(LMConfig) if f.name in values}
        for name, value in asdict(LMConfig(**given)).items():
            if name != "layers" or value is not None:
                setattr(self, name, value)
        self.max_position_embeddings, self.index_weight = max_position_embeddings, index_weight
        super().__init__(**values)
        module = CODE_FILE.removesuffix(".py")
        self.auto_map = {auto: f"{module}.{name}" for auto, name in _AUTO_MAP.items()}

    @classmethod
    def of(cls, config: LMConfig, **values: Any) -> NSALMConfig:
        """Convert a configuration; ``values`` are fields of ``PretrainedConfig``."""
        return cls(**asdict(config), **values)

    @property
    def lm(self) -> LMConfig:
        """Configuration of the language model."""
        return LMConfig(**{f.name: getattr(self, f.name) for f in fields(LMConfig)})

    @property
    def num_attention_heads(self) -> int:
        """Number of query heads."""
        return int(self.nsa["num_heads"])

    @property
    def num_key_value_heads(self) -> int:
        """Number of key and value heads."""
        return int(self.nsa["num_kv_heads"])

    @property
    def head_dim(self) -> int:
        """Size of a query and key head."""
        return int(self.nsa["head_dim"])
