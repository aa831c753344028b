"""The scenes of the contract suite that cost little, on the account that SPOT_LIVE names."""

from test_providers import (
    test_a_machine_is_listed_with_all_that_was_asked_for,
    test_a_token_stands_for_one_request_only,
    test_a_token_whose_machine_has_ended_is_spent,
    test_ending_a_machine_twice_is_fine,
    test_the_same_token_at_once_is_one_machine,
    test_the_same_token_twice_is_one_machine,
    test_what_the_cloud_takes_is_told_from_what_we_give_back,
)

__all__ = [
    "test_a_machine_is_listed_with_all_that_was_asked_for",
    "test_a_token_stands_for_one_request_only",
    "test_a_token_whose_machine_has_ended_is_spent",
    "test_ending_a_machine_twice_is_fine",
    "test_the_same_token_at_once_is_one_machine",
    "test_the_same_token_twice_is_one_machine",
    "test_what_the_cloud_takes_is_told_from_what_we_give_back",
]
