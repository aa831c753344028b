"""What can go wrong outside, in one tree.

CloudError
├── LaunchRefused            no machine was started; a changed request may succeed
│   ├── NoCapacity           the pool has none left
│   ├── PriceAboveBid        the market is above the bid
│   └── QuotaExceeded        the account may not hold more
├── TokenMismatch            the same token was used before with a different request
├── TokenSpent               the machine that this token started has already ended
├── NotOurs                  the machine does not carry our tags; it is never touched
├── Throttled                the provider asks us to slow down
├── ProviderUnreachable      no answer; the call may or may not have taken effect
└── FilesError               what a cloud keeps on a disk cannot be used, so it does not start
    ├── LedgerError          the books were not written by this version
    ├── NotPrivate           other users could read or change them
    └── WeakSecret           a secret could be guessed
"""


class CloudError(Exception):
    """Base of every error of a cloud. All but `FilesError` are what a provider answers."""

    @property
    def code(self) -> str:
        return type(self).__name__


class LaunchRefused(CloudError):  # noqa: N818 - it names what happened
    """No machine was started."""


class NoCapacity(LaunchRefused):
    """The pool has no machine left to give."""


class PriceAboveBid(LaunchRefused):
    """The market price is above the bid."""


class QuotaExceeded(LaunchRefused):
    """The account may not hold more of this."""


class TokenMismatch(CloudError):  # noqa: N818
    """The same token was used before with a different request."""


class TokenSpent(CloudError):  # noqa: N818
    """The machine that this token started has already ended."""


class NotOurs(CloudError):  # noqa: N818
    """The machine does not carry our tags, so it is never touched."""


class Throttled(CloudError):  # noqa: N818
    """The provider asks us to slow down."""


class ProviderUnreachable(CloudError):  # noqa: N818
    """No answer came; the call may or may not have taken effect."""


class FilesError(CloudError):
    """What a cloud keeps on a disk cannot be used; no provider answers with this."""


class LedgerError(FilesError):
    """The file is not a ledger that this version wrote."""


class NotPrivate(FilesError):  # noqa: N818
    """Other users could read or change what must be private."""


class WeakSecret(FilesError):  # noqa: N818
    """A secret is missing its text, or could be guessed."""
