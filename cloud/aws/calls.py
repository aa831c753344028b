"""How AWS is called: in threads of each region, once, with short time-outs, errors as ours.

boto3 blocks and takes most of a second to import, so all of it happens in an executor. Repeating a
call is decided by whoever waits for it: boto3 itself would send a refused launch three times.
"""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from email.utils import parsedate_to_datetime
from typing import Any

from cloud import errors
from cloud.aws.codes import error_of, row_of

THREADS = 4  # of each region
CONNECT_S = 3.0
READ_S = 15.0
PATIENCE_S = {"run_instances": 60.0, "receive_message": 60.0}  # longer than that for a few
PAGES_MAX = 1000
NOT_LOGGED = ("UserData", "NextToken", "ReceiptHandle")
SKEW_S = 60.0
KEY_CODES = (
    "RequestExpired",
    "SignatureDoesNotMatch",
    "InvalidSignatureException",
    "AuthFailure",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "ExpiredToken",
    "ExpiredTokenException",
)
"""What AWS says of keys that it does not take, or not at the time that our clock says it is."""
KEYS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "NoAuthTokenError",
    "TokenRetrievalError",
    "SSOTokenLoadError",
    "UnauthorizedSSOTokenError",
    "MetadataRetrievalError",
    "InvalidConfigError",
    "ConfigParseError",
)
SETTINGS = (
    "ParamValidationError",
    "NoRegionError",
    "InvalidRegionError",
    "UnknownServiceError",
    "UnknownEndpointError",
    "EndpointProviderError",
    "InvalidEndpointConfigurationError",
)
NO_SDK = (
    "boto3 is not installed, so nothing can be bought from AWS; install it with "
    "`pip install 'spot-orchestrator[aws]'`"
)

_log = logging.getLogger("cloud.aws")


def default_session() -> Any:
    """Return boto3's session, with keys from where AWS's own tools look for them."""
    import boto3

    return boto3.session.Session()


class Calls:
    """Calls to all regions. `new_session` is called in a thread, and again after keys have failed.

    A session keeps the keys that it has found first, and a client even that there were none.
    """

    def __init__(
        self,
        endpoint_url: str | None = None,
        new_session: Callable[[], Any] = default_session,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._endpoint_url = endpoint_url
        self._new_session = new_session
        self.wall = wall
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[tuple[str, str, float], Any] = {}
        self._executors: dict[str, ThreadPoolExecutor] = {}
        self._said: set[str] = set()

    async def call(
        self, region: str, service: str, operation: str, **params: Any
    ) -> dict[str, Any]:
        """Return the answer to one call, or raise an error of ours."""
        read_s = PATIENCE_S.get(operation, READ_S)
        loop = asyncio.get_running_loop()
        executor = self._executors.get(region)
        if executor is None:
            executor = ThreadPoolExecutor(THREADS, thread_name_prefix=f"aws-{region}")
            self._executors[region] = executor

        def work() -> dict[str, Any]:
            return self._perform(region, service, operation, read_s, params)

        return await loop.run_in_executor(executor, work)

    async def pages(
        self, region: str, service: str, operation: str, field: str, **params: Any
    ) -> list[Any]:
        """Return a whole list, page by page. One page that fails or lacks it fails the list."""
        found: list[Any] = []
        token: str | None = None
        for _ in range(PAGES_MAX):
            more = {"NextToken": token} if token else {}
            answer = await self.call(region, service, operation, **params, **more)
            if field not in answer:
                raise errors.Unknown(f"{_where(region, operation)}: an answer without {field}")
            found += answer[field]
            following = answer.get("NextToken")
            if not following:
                return found
            if following == token:
                break
            token = following
        raise errors.Unknown(f"{_where(region, operation)}: a list of pages without an end")

    async def near(self, region: str) -> str | None:
        """Return the region that was probably meant; None if boto3 knows this one."""
        known = await asyncio.get_running_loop().run_in_executor(None, self._regions)
        if region in known:
            return None
        return next(iter(get_close_matches(region, known, 1, 0.0)), "us-east-1")

    async def close(self) -> None:
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            client.close()

    def _perform(
        self, region: str, service: str, operation: str, read_s: float, params: dict[str, Any]
    ) -> dict[str, Any]:
        where = _where(region, operation)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s %s", where, {x: y for x, y in params.items() if x not in NOT_LOGGED})
        try:
            client = self._client(region, service, read_s)
            answer = getattr(client, operation)(**params)
        except ImportError:
            raise errors.NotAllowed(NO_SDK, "cloud") from None
        except Exception as error:
            # The causes may hold what was sent, so they are cut off; the sentence is enough.
            raise self._ours(error, where) from None
        if not isinstance(answer, dict):
            raise errors.Unknown(f"{where}: an answer that is no structure")
        return answer

    def _regions(self) -> list[str]:
        import boto3

        return list(boto3.session.Session().get_available_regions("ec2"))

    def _client(self, region: str, service: str, read_s: float) -> Any:
        with self._lock:
            key = (region, service, read_s)
            if key not in self._clients:
                from botocore.config import Config

                if self._session is None:
                    self._session = self._new_session()
                self._clients[key] = self._session.client(
                    service,
                    region_name=region,
                    endpoint_url=self._endpoint_url,
                    config=Config(
                        connect_timeout=CONNECT_S,
                        read_timeout=read_s,
                        retries={"total_max_attempts": 1, "mode": "standard"},
                        max_pool_connections=THREADS,
                        ignore_configured_endpoint_urls=self._endpoint_url is None,
                    ),
                )
            return self._clients[key]

    def _ours(self, error: Exception, where: str) -> errors.CloudError:
        response = getattr(error, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            code = str(response["Error"].get("Code", ""))
            if code in KEY_CODES:
                self._look_for_keys_again()
            said = _one_line(str(response["Error"].get("Message", "")))
            if row_of(code, said) is None and code not in self._said:
                self._said.add(code)
                _log.warning("%s: the code %s has no row in cloud/aws/codes.py", where, code[:60])
            status = int((response.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)
            return error_of(code[:100], said + self._skew(code, response), where, status)
        kinds = {kind.__name__ for kind in type(error).__mro__}
        name = type(error).__name__
        if kinds.intersection(KEYS):
            self._look_for_keys_again()
            return errors.NotAllowed(
                f"{where}: {name}: no keys for AWS; give the manager's machine an instance profile, "
                "or set AWS_PROFILE and start again",
                "cloud",
            )
        if kinds.intersection(SETTINGS):
            named = ", ".join(_named(str(error))) or "a setting of [aws]"
            return errors.Misconfigured(f"{where}: {name}: {named} is not what AWS takes")
        return errors.Unknown(f"{where}: {name}: no usable answer; the list will tell")

    def _look_for_keys_again(self) -> None:
        with self._lock:
            self._session, self._clients = None, {}

    def _skew(self, code: str, response: dict[str, Any]) -> str:
        """Return how far this machine's clock is from AWS's, if that may be the reason."""
        headers = (response.get("ResponseMetadata") or {}).get("HTTPHeaders") or {}
        if code not in KEY_CODES or not headers.get("date"):
            return ""
        try:
            off_s = self.wall() - parsedate_to_datetime(headers["date"]).timestamp()
        except ValueError:
            return ""
        if abs(off_s) < SKEW_S:
            return ""
        return f" (this machine's clock is off by {off_s:+.0f} s; set it, for example with chrony)"


def matching(name: str, values: Iterable[str]) -> dict[str, Any]:
    """Return a filter as EC2's lists take them."""
    return {"Name": name, "Values": list(values)}


def _where(region: str, operation: str) -> str:
    return f"AWS, {region}, {operation}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def _named(text: str) -> Iterator[str]:
    """Yield the parameters that a complaint of botocore names, without their values."""
    yield from re.findall(r"parameter:? \"?([\w.\[\]]{1,60})\"?", text)
