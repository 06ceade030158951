"""Which servers get requests, stepped by hand."""

from orchestrator.inference.membership import Membership


def test_a_server_that_is_out_gets_none_until_it_is_admitted_with_the_latest_reason() -> None:
    members = Membership(["a", "b"])
    members.take_out("a", "refused")
    members.take_out("a", "reset")
    assert (members.routed, members.out, members.returning) == (("b",), {"a": "reset"}, ("a",))
    members.admit("a")
    assert (members.routed, members.out) == (("a", "b"), {})


def test_each_admission_has_a_number_of_its_own_even_of_a_server_that_was_forgotten() -> None:
    members = Membership(["a"])
    numbers = [members.admission("a")]
    for _ in range(2):
        members.leave("a", "vanished")
        members.forget("a")
        members.find("a")
        members.admit("a")
        numbers.append(members.admission("a"))
    assert len(set(numbers)) == 3


def test_a_server_that_is_leaving_is_not_admitted_unless_it_is_found_again() -> None:
    members = Membership(["a"])
    members.leave("a", "vanished")
    members.admit("a")
    assert (members.routed, members.returning, members.leaving) == ((), (), ("a",))
    members.find("a")
    assert (members.routed, members.returning, members.leaving) == ((), ("a",), ())
    members.admit("a")
    assert members.routed == ("a",)


def test_only_a_server_that_is_leaving_can_be_forgotten() -> None:
    members = Membership(["a"])
    members.forget("a")
    members.take_out("stranger", "who is that")
    members.leave("stranger", "who is that")
    assert (members.servers, members.out) == (("a",), {})
