"""What can go wrong, and who caused it. Loss inside the deadline is not an error: the report has it."""


class TailcutError(Exception):
    """The base of every error that tailcut raises."""


class ConfigError(TailcutError, ValueError):
    """This rank asked for something that cannot be done."""


class PeerError(TailcutError, RuntimeError):
    """Another rank is missing or disagrees."""


class BehindError(TailcutError, RuntimeError):
    """This rank was frozen or slow for so long that its parameters are out of date."""


class BudgetExceeded(TailcutError, RuntimeError):  # noqa: N818 - the design's name
    """The network has cost more of the gradients than the budget allows."""


class ReplayError(TailcutError, RuntimeError):
    """A replay does not give what was recorded, or cannot go on."""


class ClosedError(TailcutError, RuntimeError):
    """The group is closed, or it belongs to another process."""
