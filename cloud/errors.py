"""What can go wrong outside, in one tree.

CloudError
├── Refused                  a definite no with a scope: nothing was started
│   ├── Throttled            the place asks us to slow down
│   ├── NotAllowed           a key, a role or a policy forbids it, whatever is asked for
│   ├── Misconfigured        the request can never work with these settings
│   ├── TokenMismatch        the same token was used before with a different request
│   └── TokenSpent           the machine that this token started has already ended
├── NotOurs                  the machine does not carry our tags; it is never touched
├── Unknown                  no usable answer: the call may have taken effect, the list will tell
└── FilesError               what a cloud keeps on a disk cannot be used, so it does not start
    ├── LedgerError          the books were not written by this version
    ├── NotPrivate           other users could read or change them
    └── WeakSecret           a secret could be guessed
"""

from cloud.model import Refusal, Scope

NOT_REACHED = "NotReached"
"""The code of a call that could not be made, because no connection came about."""

STOPPED_S = 600.0
"""How long a place is left alone that can sell nothing with these keys and settings."""


class CloudError(Exception):
    """Base of every error of a cloud. All but `FilesError` are what a provider answers."""

    @property
    def code(self) -> str:
        return type(self).__name__

    @property
    def refusal(self) -> Refusal | None:
        """Return the definite no of a call that did nothing; `None` if it may have done it."""
        return None


class Refused(CloudError):  # noqa: N818 - it names what happened
    """Nothing was started; the refusal says what else is not worth a call for now."""

    def __init__(
        self,
        scope: Scope,
        code: str,
        said: str,
        retry_s: float | None = None,
        room: int | None = None,
    ) -> None:
        super().__init__(said)
        self._refusal = Refusal(scope=scope, code=code, said=said, retry_s=retry_s, room=room)

    @property
    def code(self) -> str:
        return self._refusal.code

    @property
    def refusal(self) -> Refusal:
        return self._refusal


class Throttled(Refused):
    """The place asks us to slow down; the call did nothing."""

    def __init__(self, said: str, retry_s: float | None = None) -> None:
        super().__init__("place", "Throttled", said, retry_s)


class NotAllowed(Refused):
    """A key, a role or a policy forbids it; one sentence says which, and what to do."""

    def __init__(self, said: str, scope: Scope = "place") -> None:
        super().__init__(scope, "NotAllowed", said, STOPPED_S)


class Misconfigured(Refused):
    """The request can never work with these settings; one sentence says what to change."""

    def __init__(self, said: str, scope: Scope = "place") -> None:
        super().__init__(scope, "Misconfigured", said, STOPPED_S)


class TokenMismatch(Refused):
    """The same token was used before with a different request."""

    def __init__(self, said: str) -> None:
        super().__init__("request", "TokenMismatch", said)


class TokenSpent(Refused):
    """The machine that this token started has already ended."""

    def __init__(self, said: str) -> None:
        super().__init__("request", "TokenSpent", said)


class NotOurs(CloudError):  # noqa: N818
    """The machine does not carry our tags, so it is never touched."""


class Unknown(CloudError):  # noqa: N818
    """No usable answer came; the call may or may not have taken effect, and the list will tell."""


class FilesError(CloudError):
    """What a cloud keeps on a disk cannot be used; no provider answers with this."""


class LedgerError(FilesError):
    """The file is not a ledger that this version wrote."""


class NotPrivate(FilesError):  # noqa: N818
    """Other users could read or change what must be private."""


class WeakSecret(FilesError):  # noqa: N818
    """A secret is missing its text, or could be guessed."""
