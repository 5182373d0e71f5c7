import subprocess

import pytest

from swarmq.black_box.working_copy import open_copy, restore
from swarmq.errors import TaskError


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def plain(tmp_path):
    """A folder that is no repository."""
    source = tmp_path / "source"
    (source / "tests").mkdir(parents=True)
    (source / "main.py").write_text("old")
    (source / "tests/test_main.py").write_text("check")
    return source


@pytest.fixture
def repository(plain):
    """The same as a git repository with two commits; the second is the solution."""
    git(plain, "init", "-q")
    git(plain, "add", "-A")
    git(plain, "commit", "-qm", "one")
    (plain / "main.py").write_text("solution")
    git(plain, "commit", "-qam", "two")
    return plain


def copied(source, **options):
    return open_copy(source, **{"commit": None, "parent": None, "keep": False, **options})


async def test_a_copy_has_the_content_and_is_a_repository_without_history(plain):
    async with copied(plain) as folder:
        work = folder / "work"
        assert (work / "main.py").read_text() == "old"
        assert git(work, "log", "--format=%s") == "Task"
        assert git(work, "status", "--porcelain") == ""
        assert list((folder / "home").iterdir()) == []
        (work / "main.py").write_text("new")
    assert not folder.exists()
    assert (plain / "main.py").read_text() == "old"


async def test_a_commit_is_copied_without_those_after_it(repository):
    async with copied(repository, commit="HEAD~1") as folder:
        assert (folder / "work/main.py").read_text() == "old"
        assert git(folder / "work", "log", "--format=%s") == "Task"
        assert git(folder / "work", "remote") == ""
    async with copied(repository) as folder:
        assert (folder / "work/main.py").read_text() == "solution"


async def test_files_that_git_does_not_know_stay_behind(repository):
    (repository / "notes").write_text("mine")
    async with copied(repository) as folder:
        assert not (folder / "work/notes").exists()


async def test_without_a_folder_the_copy_is_empty(tmp_path):
    async with copied(None, parent=tmp_path, keep=True) as folder:
        assert [path.name for path in (folder / "work").iterdir()] == [".git"]
    assert folder.is_dir()
    assert folder.parent == tmp_path


@pytest.mark.parametrize("commit", ["nothing", None])
async def test_a_missing_folder_or_commit_is_named(repository, tmp_path, commit):
    source = repository if commit else tmp_path / "nowhere"
    with pytest.raises(TaskError, match=commit or "nowhere"):
        async with copied(source, commit=commit):
            pass


async def test_a_commit_of_a_plain_folder_is_refused(plain):
    with pytest.raises(TaskError, match="not the top of a git repository"):
        async with copied(plain, commit="HEAD"):
            pass


async def test_a_folder_that_the_agent_made_unreadable_goes_away_too(plain):
    async with copied(plain) as folder:
        (folder / "work/locked/inner").mkdir(parents=True)
        (folder / "work/locked").chmod(0)
    assert not folder.exists()


def replace_by_link(work, outside):
    for path in sorted((work / "tests").rglob("*"), reverse=True):
        path.unlink()
    (work / "tests").rmdir()
    (work / "tests").symlink_to(outside)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda work, outside: (work / "tests/test_main.py").write_text("pass"),
        lambda work, outside: (work / "tests/conftest.py").write_text("skip everything"),
        replace_by_link,
    ],
)
async def test_restored_paths_are_the_original_again(plain, tmp_path, tamper):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    async with copied(plain) as folder:
        work = folder / "work"
        (work / "main.py").write_text("new")
        tamper(work, outside)
        restore(work, ["tests"], plain, commit=None)
        assert [path.name for path in (work / "tests").iterdir()] == ["test_main.py"]
        assert not (work / "tests").is_symlink()
        assert (work / "tests/test_main.py").read_text() == "check"
        assert (work / "main.py").read_text() == "new"
    assert (outside / "kept").read_text() == "kept"


async def test_one_file_below_a_linked_folder_is_restored_in_the_copy(plain, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    async with copied(plain) as folder:
        replace_by_link(folder / "work", outside)
        restore(folder / "work", ["tests/test_main.py"], plain, commit=None)
        assert (folder / "work/tests/test_main.py").read_text() == "check"
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("path", ["/etc", "../source", "missing"])
async def test_only_paths_of_the_source_are_restored(plain, path):
    async with copied(plain) as folder:
        with pytest.raises(TaskError, match=f"--restore {path}"):
            restore(folder / "work", [path], plain, commit=None)
