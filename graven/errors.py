"""Every error that graven raises on purpose, and the sentence for every way a write can end.

The tree, with the built-in class that each also is:

    GravenError
    |-- ShapeError         ValueError    a tensor of the wrong shape
    |-- SpecError          ValueError    a setting that is unknown, impossible or in conflict
    |-- TextError          ValueError    a text or a query that the model or the task cannot take
    |-- ModelError         ValueError    a language model that is missing, broken or not usable behind a memory
    |-- MismatchError      ValueError    a memory and a model that do not belong together
    |-- MemoryFileError    ValueError    a file that is not a whole, readable memory
    |-- LayerFileError     ValueError    a file that is not a whole, readable layer or teacher
    |-- OrderError         RuntimeError  a derivative of an order that an operation does not have
    `-- OutputError        OSError       a result that cannot be written where it was asked for
"""

from enum import Enum


class GravenError(Exception):
    """The root: `except GravenError` catches whatever graven raises on purpose."""


class ShapeError(GravenError, ValueError):
    """A tensor has another shape than the one that is needed."""


class SpecError(GravenError, ValueError):
    """A setting is unknown, out of range, or in conflict with another."""


class TextError(GravenError, ValueError):
    """A text or a query cannot be written or asked as it stands."""


class ModelError(GravenError, ValueError):
    """A language model cannot be found, loaded, or used behind a memory."""


class MismatchError(GravenError, ValueError):
    """A memory was written with another model than the one that is asked to read it."""


class MemoryFileError(GravenError, ValueError):
    """A file is not a whole, readable memory."""


class LayerFileError(GravenError, ValueError):
    """A file is not a whole, readable layer or teacher."""


class OrderError(GravenError, RuntimeError):
    """A derivative of an order is asked for that an operation does not have, or would leave out without a word."""


class OutputError(GravenError, OSError):
    """A result cannot be written where it was asked for."""


class Outcome(Enum):
    """How a write or a search ended. The value is the sentence that a user reads."""

    DONE = "every step was taken"
    EXACT = "the text is reproduced exactly"
    STEPS = "the steps ran out before the text was reproduced exactly; raise `--steps` or `--slots`"
    DEADLINE = "the deadline came before the text was reproduced exactly; raise `--deadline` or `--slots`"
    CLOSE = "the loss fell below what was asked for"
    LATE = "the deadline came before every step was taken and the state until then was kept; raise `--deadline`"
    DIVERGED = "the loss diverged and the best state before that was kept; lower `--rate`"
    IMPORTED = "the vectors were made by another tool, and nothing is known of their text"
    SOLVED = "one fixed point was found on the whole range where there can be any"
    SEVERAL = "several fixed points were found and the one of lowest risk was taken"
