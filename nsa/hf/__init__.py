"""Hugging Face transformers: configuration, model and cache, and export of trained runs.

``import nsa.hf`` registers the classes, so that ``AutoModelForCausalLM.from_pretrained`` finds
them. Saved folders also name them for ``trust_remote_code=True``, which needs no import. Needs the
extra ``hf``.
"""

from nsa.extras import require

require("nsa.hf", "hf")

from transformers import (  # noqa: E402 (checked above)
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from nsa.hf.attention import keys_read, register  # noqa: E402
from nsa.hf.cache import GenerationCache  # noqa: E402
from nsa.hf.config import NSALMConfig  # noqa: E402
from nsa.hf.model import (  # noqa: E402
    NSAForCausalLM,
    NSAForSequenceClassification,
    NSAForTokenClassification,
    NSAModel,
)

AutoConfig.register(NSALMConfig.model_type, NSALMConfig, exist_ok=True)
for auto, model in (
    (AutoModel, NSAModel),
    (AutoModelForCausalLM, NSAForCausalLM),
    (AutoModelForSequenceClassification, NSAForSequenceClassification),
    (AutoModelForTokenClassification, NSAForTokenClassification),
):
    auto.register(NSALMConfig, model, exist_ok=True)

__all__ = [
    "GenerationCache",
    "NSAForCausalLM",
    "NSAForSequenceClassification",
    "NSAForTokenClassification",
    "NSALMConfig",
    "NSAModel",
    "keys_read",
    "register",
]
