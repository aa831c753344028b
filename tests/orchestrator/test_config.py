"""Settings: one clear line for every mistake, one source for what exists."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloud.ranges import flaw_in
from orchestrator.cli.submit import job_spec
from orchestrator.config import (
    FILE_BYTES_MAX,
    Config,
    ConfigError,
    JobSettings,
    environment,
    keys,
    line_of,
    load,
    template,
)
from orchestrator.events import JobSpec

ROOT = Path(__file__).parents[2]

ALL_KEYS = """
manager: state_dir deployment control_period_s door_port usd_per_h redis_url
ray: head_address port
budget: total_usd per_h_usd on_demand_allowed
buying: regions egress_usd_per_gb disk_usd_per_h quote_max_age_s
job: slots_min slots_max depth haste max_failures max_preemptions exact nan backup_every_steps sums checkpoint_every_s max_replay_s tail_s checkpoints_kept output_files output_bytes transport
storage: checkpoint_url copy_every_s
local: enabled seed tempo prices billing
aws: enabled regions types images subnets security_groups instance_profile drill_role disk_gib queue_url certificates endpoint_url
azure: subscription resource_group subnets types image identity ssh_public_key disk_gb certificates sign_in endpoint prices_endpoint lists_lag_s
dashboard: enabled host port
hooks: url on
limits: boot_timeout_s launch_grace_s silent_after_s script_bytes parcel_bytes
"""


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "orchestrator.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def mistake(folder: Path, text: str | bytes, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), env or {})
    return str(caught.value).removeprefix(str(folder) + "/")


def test_the_set_of_keys_is_frozen():
    """A setting is added or removed on purpose: the list above must change with it."""
    section, expected = "", []
    for word in ALL_KEYS.split():
        if word.endswith(":"):
            section = word[:-1]
        else:
            expected.append((section, word))
    assert list(keys()) == expected


def test_the_file_in_the_repository_is_the_template():
    """`orchestrator.toml` lists every key, because it is written from the models."""
    assert (ROOT / "orchestrator.toml").read_text() == template()


def test_the_template_shows_every_key_with_its_default(tmp_path):
    """Each key stands in its own section with its default, or as a comment when it has none."""
    written, defaults = tomllib.loads(template()), Config().model_dump()
    sections = template().split("\n[")[1:]
    for (section, key), block in [
        ((s, k), b) for s, k in keys() for b in sections if b.startswith(f"{s}]")
    ]:
        if defaults[section][key] is None:
            assert f"\n# {key} = " in block
            assert key not in written[section]
        else:
            assert written[section][key] == defaults[section][key]
    assert load(write(tmp_path, template()), {}).budget == Config().budget


def test_the_examples_of_unset_keys_are_valid(tmp_path):
    """Taking the comment sign away from an example gives a file that loads."""
    optional = [f"# {key} = " for _, key in keys()]
    lines = [
        line[2:] if any(line.startswith(prefix) for prefix in optional) else line
        for line in template().splitlines()
    ]
    config = load(write(tmp_path, "\n".join(lines)), {})
    assert config.budget.total_usd == 50.0
    assert config.job.max_preemptions == 100


def test_azure_is_set_as_a_whole_or_not_at_all(tmp_path):
    """Nothing set buys nothing there; what is missing, or has no region, is one line."""
    assert load(write(tmp_path, ""), {}).azure.settings("") is None
    half = '[azure]\nsubscription = "s"\nimage = "i"\nssh_public_key = "ssh-ed25519 AAAA"\n'
    assert "subnets is not set" in mistake(tmp_path, half)
    assert "region=/subscriptions" in mistake(tmp_path, half + 'subnets = "eastus"\n')
    whole = load(write(tmp_path, half + 'subnets = "eastus=/a, westus2=/b"\n'), {})
    whole = whole.azure.settings("boot")
    assert whole is not None
    assert whole.subnets == {"eastus": "/a", "westus2": "/b"}
    assert (whole.types, whole.boot_script) == (("Standard_NC*",), "boot")


def test_a_container_of_azure_may_be_named_with_its_account(tmp_path):
    """Machines reach it by this address alone; `az://` leaves the account to each environment."""
    place = "abfss://states@account.dfs.core.windows.net/prefix"
    config = load(write(tmp_path, f'[storage]\ncheckpoint_url = "{place}"\n'), {})
    assert config.storage.checkpoint_url == place


def test_precedence_is_flag_environment_file_default(tmp_path):
    """The nearest source wins, key by key."""
    file = write(tmp_path, "[job]\nslots_min = 1\nslots_max = 5\nmax_failures = 1\n")
    env = {"ORCHESTRATOR__JOB__SLOTS_MIN": "2", "ORCHESTRATOR__JOB__SLOTS_MAX": "6"}
    job = load(file, env, {"job.slots_min": "3"}).job
    assert (job.slots_min, job.slots_max, job.max_failures) == (3, 6, 1)
    assert load(file, {}).budget == Config().budget


def test_flags_reach_a_child_process_as_its_environment(tmp_path):
    """What `up --set` was told holds in the process that it starts."""
    flags = {"job.nan": "skip", "dashboard.enabled": "false", "manager.deployment": "123"}
    file = write(tmp_path, "")
    assert load(file, environment(flags)) == load(file, {}, flags)


def test_paths_are_resolved_against_the_file(tmp_path):
    """Every command means the same folder, wherever it is run from."""
    config = load(write(tmp_path, '[local]\nprices = "p.json"\n'), {})
    assert config.state_dir == tmp_path / ".orchestrator"
    assert config.local.prices == str(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[budget]\n\ntotal_usd = "x"', '3: budget.total_usd: found "x"; allowed: a number, '),
        (
            "[budget]\ntotl_usd = 1",
            "2: budget.totl_usd is not a setting; did you mean budget.total_usd?",
        ),
        (
            "[manager]\nslots_max = 1",
            "2: manager.slots_max is not a setting; did you mean job.slots_max?",
        ),
        ("[bugdet]\ntotal_usd = 1", "1: bugdet is not a setting; did you mean budget?"),
        ("# a\nbudget = 3", "2: budget: found 3; allowed: a section, written as [budget]"),
        ("[[job]]\nnan = 3", "1: job: found a list; allowed: a section, written as [job]"),
        ("[job]\nnan = 'no'", '2: job.nan: found "no"; allowed: "fail" or "skip"'),
        (
            "[job]\nslots_min = true",
            "2: job.slots_min: found true; allowed: a whole number, at least 1",
        ),
        ("[job]\nslots_min = 9", "2: job: slots_min = 9 is above slots_max = 4"),
        (
            "[job]\ndepth = 9",
            "2: job: depth = 9 is above slots_max = 4; every stage needs a worker",
        ),
        (
            "[job]\ndepth = 0",
            '2: job.depth: found 0; allowed: a whole number, at least 1 and at most 10000 or "auto"',
        ),
        (
            '[job]\ndepth = "deep"',
            '2: job.depth: found "deep"; allowed: a whole number, at least 1 and at most 10000 or "auto"',
        ),
        (
            "[job]\n\nslots_max = 0",
            "3: job.slots_max: found 0; allowed: a whole number, at least 1",
        ),
        (
            "[job]\ncheckpoint_every_s = nan",
            "2: job.checkpoint_every_s: found nan; allowed: a number, at least 0.001",
        ),
        (
            "[ray]\nhead_address = '8.8.8.8'",
            '2: ray.head_address: found "8.8.8.8"; allowed: a loopback or private',
        ),
        (
            "[ray]\nhead_address = '0.0.0.0'",
            '2: ray.head_address: found "0.0.0.0"; allowed: a loopback or private',
        ),
        (
            "[ray]\nhead_address = 'fd00::2'",
            '2: ray.head_address: found "fd00::2"; allowed: a loopback or private',
        ),
        (
            "[ray]\nhead_address = 'fe80::1%$(reboot)'",
            '2: ray.head_address: found "fe80::1%$(reboot)"; allowed: a loopback or private',
        ),
        (
            "[ray]\nhead_address = 'me'",
            '2: ray.head_address: found "me"; allowed: an address in numbers',
        ),
        (
            "[dashboard]\nhost = '0.0.0.0'",
            '2: dashboard.host: found "0.0.0.0"; allowed: a loopback address',
        ),
        (
            "[dashboard]\nport = 70000",
            "2: dashboard.port: found 70000; allowed: a whole number, at least 0 and at most 65535",
        ),
        (
            '[manager]\ndeployment = "My Team"',
            '2: manager.deployment: found "My Team"; allowed: a text in quotes, 1 to 32 small',
        ),
        (
            '[manager]\nstate_dir = "a\\u0000b"',
            '2: manager.state_dir: found "a\\u0000b"; allowed: a text in quotes',
        ),
        (
            "[budget]\ntotal_usd = -1",
            "2: budget.total_usd: found -1; allowed: a number, at least 0",
        ),
        (
            "budget.total_usd = 1979-05-27",
            "1: budget.total_usd: found 1979-05-27; allowed: a number",
        ),
        ("budget = { total_usd = {} }", "1: budget.total_usd: found a section; allowed: a number"),
        ("a = [\n1,\n", "3: not TOML: "),
        (b"[job]\n\xff", "2: byte 0xff is not UTF-8 text"),
        ("x = " + "[" * 5000, " values are nested too deeply"),
        (b"#" * (FILE_BYTES_MAX + 1), " larger than 65536 bytes"),
    ],
)
def test_a_mistake_is_one_line_that_says_where_what_and_what_is_allowed(tmp_path, text, line):
    """File, line, key path, what was found, what is allowed; nothing else."""
    message = mistake(tmp_path, text)
    assert message.startswith(f"orchestrator.toml:{line}")
    assert "\n" not in message


def test_a_setting_of_a_job_that_the_file_allows_is_one_that_the_manager_takes():
    """At the edges of each range: a number that is refused only once it is handed in has no line in a file."""
    for name, field in JobSettings.model_json_schema()["properties"].items():
        for kind in field.get("anyOf", [field]):
            if kind.get("type") not in ("integer", "number"):
                continue
            for edge in (kind.get("minimum", 1e-320), kind.get("maximum", 10**30)):
                job = {"slots_max": 100_000, name: edge}
                spec = job_spec(Config(job=JobSettings(**job)), Path("train.py"), ())
                assert not flaw_in(spec, JobSpec), name


def test_several_mistakes_are_a_line_each(tmp_path):
    """A person can fix them in one go; the number of lines is bounded."""
    message = mistake(
        tmp_path, "[job]\nnan = 1\nslots_min = 0\n" + "".join(f"x{i} = 1\n" for i in range(9))
    )
    assert len(message.splitlines()) == 5
    assert message.startswith("orchestrator.toml:3: job.slots_min: ")


@pytest.mark.parametrize(
    "name",
    [
        "ORCHESTRATOR_BUDGET__TOTAL_USD",
        "ORCHESTRATOR_BUDGET_TOTAL_USD",
        "orchestrator__budget__total_usd",
    ],
)
def test_a_variable_that_is_nearly_a_setting_is_refused(tmp_path, name):
    """It would be ignored, and all would be bought without the budget that a person has set."""
    message = mistake(tmp_path, "", {name: "5"})
    assert (
        message
        == f"environment {name}: is not read; that setting is ORCHESTRATOR__BUDGET__TOTAL_USD"
    )
    load(
        write(tmp_path, ""),
        {"ORCHESTRATOR_RAY_PORT": "tcp://10.0.0.1:80", "ORCHESTRATOR_HOME": "x"},
    )


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (
            {"BUDGET__TOTAL_USD": "x"},
            'BUDGET__TOTAL_USD: budget.total_usd: found "x"; allowed: a number',
        ),
        (
            {"BUDGET__TOTL_USD": "1"},
            "BUDGET__TOTL_USD: budget.totl_usd is not a setting; did you mean budget.total_usd?",
        ),
        ({"BUDGET": "1"}, "BUDGET: budget is not a setting; allowed in [budget]: total_usd"),
        ({"JOB__SLOTS_MIN": "9"}, "JOB__SLOTS_MIN: job: slots_min = 9 is above slots_max = 4"),
        (
            {"MANAGER__API_KEY": "s3cret"},
            "MANAGER__API_KEY: manager.api_key: this looks like a secret",
        ),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(tmp_path, env, line):
    """The line points at the variable instead of at a file."""
    message = mistake(tmp_path, "", {f"ORCHESTRATOR__{key}": value for key, value in env.items()})
    assert message.startswith(f"environment ORCHESTRATOR__{line}")


def test_a_home_folder_is_found_or_refused(tmp_path, monkeypatch):
    """A folder with the name ~ took the journal, where nobody would look for it."""
    monkeypatch.setenv("HOME", "/home/me")
    file = write(tmp_path, "")
    for typed, meant in (("~", "/home/me"), ("~/spot", "/home/me/spot"), ("~root/x", "/root/x")):
        assert load(file, {}, {"manager.state_dir": typed}).state_dir == Path(meant)
    with pytest.raises(ConfigError, match=r"^~nosuch/x: ~nosuch is nobody's home folder here"):
        load(file, {}, {"manager.state_dir": "~nosuch/x"})


def test_a_missing_file_is_named_with_the_remedy(tmp_path, monkeypatch):
    """A path that was given must exist; no path at all means the defaults."""
    (tmp_path / "orchestrator.toml").symlink_to("unmounted.toml")  # its limits would not hold
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"leads to unmounted\.toml, which is not there"):
        load(None, {})
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such file; `orchestrator init`"):
        load(tmp_path / "nowhere.toml", {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, {})


@pytest.mark.parametrize(
    "text",
    [
        '[manager]\naws_secret_access_key = "hunter2"',
        '[manager]\nredis_url = "redis://:hunter2@10.0.0.1/0"',
        '[deep.down]\nPassword = "hunter2"',
        '[ray]\ntoken = "hunter2"',
    ],
)
def test_secrets_are_refused_and_not_repeated(tmp_path, text):
    """A file that will be committed is no place for a secret, and neither is an error message."""
    message = mistake(tmp_path, text)
    assert message.startswith("orchestrator.toml:2: ")
    assert "looks like a secret" in message
    assert "hunter2" not in message


def test_an_address_with_a_password_may_come_from_the_environment(tmp_path):
    """It is not written to any file there; a mistake in it does not print the password."""
    name = "ORCHESTRATOR__MANAGER__REDIS_URL"
    config = load(write(tmp_path, ""), {name: "redis://:hunter2@10.0.0.1/0"})
    assert config.manager.redis_url == "redis://:hunter2@10.0.0.1/0"
    assert "hunter2" not in mistake(tmp_path, "", {name: "http://:hunter2@10.0.0.1/0"})


def test_a_key_is_found_however_it_is_written():
    """Dotted keys, quoted keys, inline tables and texts that look like keys do not confuse it."""
    text = (
        'a = """\n[job]\nnan = 1\n"""\n\n'
        "[job] # x\n"
        "# nan = 3\n"
        '"n\\u0061n" = 2\n'
        "list = [\n1,\n2]\n"
        "other = 1\n\n"
        "[budget]\ninner = { deep = 1 }\n"
    )
    places = {
        ("a",): 1,
        ("job",): 6,
        ("job", "nan"): 8,
        ("job", "list"): 9,
        ("job", "other"): 12,
        ("budget", "inner", "deep"): 15,
    }
    assert {path: line_of(text, path) for path in places} == places


VALUES = st.recursive(
    st.sampled_from(
        [
            "1",
            "-1",
            "0.5",
            "inf",
            "nan",
            "true",
            '"x"',
            '""',
            "'\\'",
            "07:32:00",
            "2020-01-01",
            '"\\u001b[31m"',
            "9" * 40,
            "1e999",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: f"[{', '.join(items)}]")
        | inner.map(lambda value: f"{{ k = {value} }}")
    ),
    max_leaves=3,
)
LINES = st.one_of(
    st.sampled_from([f"[{section}]" for section in Config.model_fields] + ["[[job]]", "[x]", ""]),
    st.builds(
        lambda key, value: f"{key} = {value}",
        st.sampled_from([key for _, key in keys()] + ["job.nan", '"\\n"', "budget", "zzz"]),
        VALUES,
    ),
    st.text(max_size=20),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.lists(LINES, max_size=8).map("\n".join).map(str.encode))
def test_any_file_gives_settings_or_clear_lines(tmp_path, data):
    """Whatever the bytes: either a valid tree, or a few printable lines that start with the file."""
    file = write(tmp_path, data)
    try:
        config = load(file, {})
    except ConfigError as error:
        lines = str(error).split("\n")
        assert 1 <= len(lines) <= 5
        assert all(line.startswith(f"{file}:") and line.isprintable() for line in lines)
        assert all(len(line) < 500 for line in lines)
    else:
        assert config.job.slots_min <= config.job.slots_max


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_variable_gives_settings_or_clear_lines(tmp_path, key, value):
    """The environment is held to the same standard as the file."""
    file = write(tmp_path, "")
    for name in (key, "JOB__NAN", "LOCAL__SEED", "DASHBOARD__HOST", f"JOB__{key}"):
        try:
            load(file, {f"ORCHESTRATOR__{name}": value})
        except ConfigError as error:
            assert all(line.isprintable() for line in str(error).split("\n"))
