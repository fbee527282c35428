"""All errors Foreload raises on purpose.

    ForeloadError                 exit 1
    ├── UsageError                exit 2   a flag, file, field or request is wrong
    │   ├── FileError             exit 2   a file is missing, unreadable, corrupt or of another schema
    │   └── SettingsError         exit 2   a setting is unknown, out of range or contradicts another
    │       └── ReloadError       exit 2   a setting that a running engine cannot take
    ├── MismatchError             exit 2   two inputs do not belong together (profile and model, trace and model)
    ├── BudgetError               exit 3   a budget cannot hold what it must; carries the shortfall in bytes
    └── InternalError             exit 1   an invariant of ours is broken: a bug

The message is one line: it names the file or field, the value, and what would be accepted.
"""

from __future__ import annotations


class ForeloadError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class UsageError(ForeloadError):
    """A flag, file, field or request is wrong."""

    exit_code = 2


class FileError(UsageError):
    """A file is missing, unreadable, corrupt or of another schema."""


class SettingsError(UsageError):
    """A setting is unknown, out of range or contradicts another."""


class ReloadError(SettingsError):
    """A setting that is fixed when the model is loaded differs from what a running engine has."""


class MismatchError(ForeloadError):
    """Two inputs do not belong together."""

    exit_code = 2


class BudgetError(ForeloadError):
    """A budget cannot hold what it must hold.

    `shortfall_bytes` is the smallest increase of `budget` that would do.
    """

    exit_code = 3

    def __init__(self, message: str, budget: str, shortfall_bytes: int) -> None:
        super().__init__(message)
        self.budget = budget
        self.shortfall_bytes = shortfall_bytes


class InternalError(ForeloadError):
    """An invariant of ours is broken."""
