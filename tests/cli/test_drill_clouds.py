"""A drill on a real cloud: the cloud's own rehearsal interrupts machines of ours, and no others."""

from test_check_clouds import arm, ec2
from test_gc_clouds import GPU, T4, bought

assert ec2, arm  # fixtures
ROLE = ("--set", "aws.drill_role=arn:aws:iam::111122223333:role/drill")
ON_AWS = ("tools", "drill", "--cloud", "aws", "--yes", *ROLE)


def warned(ec2):
    """The machines whose interruption the queue announces, among other news of machines."""
    kind = "EC2 Spot Instance Interruption Warning"
    return [x["detail"]["instance-id"] for x in ec2.account.queue if x["detail-type"] == kind]


def test_aws_interrupts_as_many_as_are_asked_for_with_its_own_notice(shell, ec2):
    """More than one experiment takes, and none of another deployment; no template stays."""
    ours = {bought(shell, f"t-{nth}", GPU) for nth in range(7)}
    theirs = bought(shell, "t-8", GPU, "theirs")
    answer = shell(*ON_AWS, "--nodes", "6", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["warning_s"] == 120
    taken = set(answer.json["machines"])
    noticed = {x.id for x in ec2.account.instances.values() if x.notice_deadline_s}
    assert len(taken) == 6
    assert taken == noticed <= ours
    assert theirs not in noticed
    assert not ec2.account.experiments
    assert set(warned(ec2)) == taken


def test_an_experiment_that_fails_after_it_was_accepted_took_nothing(shell, ec2):
    """Its reason is said, and the machines of the experiments before it are named."""
    ours = [bought(shell, f"t-{nth}", GPU) for nth in range(6)]
    ec2.account.drill_fails = "Access denied."
    answer = shell(*ON_AWS)
    assert answer.code == 1
    assert "is failed: Access denied; set aws.drill_role" in answer.line
    assert not warned(ec2)

    def fault(action: str, nth: int) -> None:
        """Let the first experiment of the second drill do, and the one after it fail."""
        if action == "CreateExperimentTemplate":
            ec2.account.drill_fails = "" if len(ec2.account.drills) == 1 else "Access denied."

    ec2.fault = fault
    line = shell(*ON_AWS, "--nodes", "all").line
    taken = warned(ec2)
    assert (len(taken), set(taken) < set(ours)) == (5, True)
    assert all(name in line.partition("interrupted before that: ")[2] for name in taken)
    assert not ec2.account.experiments


def test_a_drill_without_machines_or_without_a_role_says_what_is_missing(shell, ec2):
    """One line each, with what to do."""
    assert "no spot machine is running" in shell(*ON_AWS).line
    bought(shell, "t-1", GPU)
    assert (
        "set it to the output DrillRole" in shell("tools", "drill", "--cloud", "aws", "--yes").line
    )
    other = "aws.drill_role=arn:aws:iam::111122223333:role/other"
    line = shell("tools", "drill", "--cloud", "aws", "--yes", "--set", other).line
    assert "cannot be assumed by FIS; correct aws.drill_role" in line
    assert "gives its own notice" in shell(*ON_AWS, "--warning", "5").line
    line = shell("tools", "drill", "--cloud", "azure").line
    assert "orchestrator init --cloud azure" in line


def test_one_silent_region_stops_no_drill_and_a_program_has_to_say_yes(shell, ec2):
    """What answers is taken, and who does not answer is said."""
    name = bought(shell, "t-1", GPU)
    answer = shell(*(word for word in ON_AWS if word != "--yes"))
    assert (answer.code, f"({name}); if they may go, add --yes" in answer.line) == (2, True)
    assert not warned(ec2)
    ec2.silent.add("us-west-2")
    two = (
        "aws.regions=us-west-2,us-east-1",
        "aws.images=us-east-1=ami-us-east-1,us-west-2=ami-us-west-2",
        "aws.subnets=us-east-1a=subnet-us-east-1a,us-west-2a=subnet-us-west-2a",
        "aws.security_groups=us-east-1=sg-us-east-1,us-west-2=sg-us-west-2",
    )
    answer = shell(*ON_AWS, *(word for one in two for word in ("--set", one)))
    assert answer.code == 0, answer.err
    assert "us-west-2" in answer.out
    assert f"taken with 120 s of notice: {name}" in answer.out


def test_azure_evicts_by_its_simulation(shell, arm):
    """Half a minute later the machine is gone, by the provider; machines made by hand stay."""
    name = bought(shell, "t-1", T4)
    arm.dials = type(arm.dials)(create_s=(0.0, 0.0))
    second = bought(shell, "t-2", T4)
    answer = shell("tools", "drill", "--cloud", "azure", "--yes", "--nodes", "all", "--json")
    assert answer.json == {"cloud": "azure", "warning_s": 30.0, "machines": [second]}
    arm._work_off(arm.now_s + 31)
    assert second not in arm.vms
    assert {"by-hand", "web-1", name} <= set(arm.vms)
