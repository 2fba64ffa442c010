"""Hugging Face transformers: configuration, model and cache, and export of trained runs.

``import nsa.hf`` registers the classes, so that ``AutoModelForCausalLM.from_pretrained`` finds
them. Saved folders also name them for ``trust_remote_code=True``, which needs no import. Needs the
extra ``hf``.
"""

from nsa.extras import require

require("nsa.hf", "hf")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402 (checked above)

from nsa.hf.cache import GenerationCache  # noqa: E402
from nsa.hf.config import NSALMConfig  # noqa: E402
from nsa.hf.model import NSAForCausalLM  # noqa: E402

AutoConfig.register(NSALMConfig.model_type, NSALMConfig, exist_ok=True)
AutoModelForCausalLM.register(NSALMConfig, NSAForCausalLM, exist_ok=True)

__all__ = ["GenerationCache", "NSAForCausalLM", "NSALMConfig"]
