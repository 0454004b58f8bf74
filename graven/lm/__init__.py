"""The one door to a language model."""

from graven.lm.base import Continuation, LanguageModel
from graven.lm.pretrained import Pretrained, load_pretrained
from graven.lm.small import Small

__all__ = ["Continuation", "LanguageModel", "Pretrained", "Small", "load_pretrained"]
