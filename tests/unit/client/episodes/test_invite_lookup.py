import pytest

from swarmq.client.async_client import AsyncSwarmClient
from swarmq.client.episodes.invite_lookup import find_invite
from swarmq.errors import KeyRefusedError


@pytest.fixture
def invite(make_invite):
    return make_invite()


def test_text_file_folder_variable_and_object_all_lead_to_the_invite(invite, tmp_path, monkeypatch):
    (tmp_path / "invite").write_text(invite.encode() + "\n")
    monkeypatch.setenv("SWARMQ_INVITE", str(tmp_path))
    for source in (invite, invite.encode(), f"  {invite.encode()}\n", tmp_path, str(tmp_path / "invite"), None):
        assert find_invite(source) == invite
    monkeypatch.setenv("SWARMQ_INVITE", invite.encode())
    assert find_invite() == invite


def test_without_any_invite_the_error_says_where_one_comes_from(monkeypatch):
    monkeypatch.delenv("SWARMQ_INVITE", raising=False)
    with pytest.raises(KeyRefusedError, match=r"set \$SWARMQ_INVITE; `swarmq up` writes an invite"):
        AsyncSwarmClient()


def test_a_damaged_invite_is_said_to_be_damaged_and_not_repeated(invite):
    text = invite.encode()
    with pytest.raises(KeyRefusedError, match="damaged") as caught:
        find_invite(text[:-20])
    assert text[30:60] not in str(caught.value)


def test_each_wrong_path_is_named(tmp_path, monkeypatch):
    with pytest.raises(KeyRefusedError, match="start the run with `swarmq up JOB`"):
        find_invite(tmp_path)
    with pytest.raises(KeyRefusedError, match="nowhere does not exist"):
        find_invite(tmp_path / "nowhere")
    (tmp_path / "other").write_text("hello")
    with pytest.raises(KeyRefusedError, match="not an invite"):
        find_invite(tmp_path / "other")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(KeyRefusedError, match="cannot be read"):
        find_invite(tmp_path / "bytes")
    monkeypatch.setenv("SWARMQ_INVITE", "oops")
    with pytest.raises(KeyRefusedError, match=r"\$SWARMQ_INVITE is neither"):
        find_invite()
    with pytest.raises(KeyRefusedError, match="cannot be read: .*File name too long"):
        find_invite("x" * 300)
    with pytest.raises(KeyRefusedError, match="nor a path"):
        find_invite("two\nlines")
