"""`swarmq dashboard`: web pages about runs."""

from __future__ import annotations

from pathlib import Path

import click

from swarmq.cli.common import main, private_files, require_extras
from swarmq.config import RunFolder
from swarmq.errors import ConfigError
from swarmq.runtime.terminal import visible

PORT = 8600


@main.command()
@click.argument("folders", nargs=-1, metavar="[FOLDER...]", type=click.Path(path_type=Path))
@click.option(
    "--port", default=PORT, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 picks a free one."
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Others than this machine's own are open to the network, without encryption.",
)
@click.option("--open", "opens", is_flag=True, help="Open the link in a browser.")
@private_files()
def dashboard(folders: tuple[Path, ...], port: int, host: str, *, opens: bool) -> None:
    """Show runs and studies in a browser.

    Shows every episode and token, curves, queues, and which process holds a run up. FOLDER is a run's folder, or a folder of runs;
    runs by default. Studies are found in FOLDER and its `studies`, by default those of this folder. Live, stopped, crashed and copied runs can be read. The dashboard only reads files, so it neither slows nor
    stops a run. Prints a link with a token; whoever has the link can read the runs, and operate those whose secret you can read.
    The last example shows runs of another machine.

    \b
    swarmq dashboard                            all runs in runs/
    swarmq dashboard runs/math /data/old-runs --open
    ssh -L 8600:127.0.0.1:8600 gpu-host swarmq dashboard runs/math
    """
    require_extras("dashboard")
    import webbrowser

    from swarmq.dashboard.serving import serve
    from swarmq.studies.pages import StudyShelf

    def say(link: str) -> None:
        click.echo(link)
        if opens:
            webbrowser.open(link)

    for folder in folders:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "there is no such folder"
            raise ConfigError(f"{folder}: {what}; give the folder of a run, or one that holds such folders")
    shown = folders or (Path("runs"),)
    for folder in shown:
        is_used = RunFolder(folder).resolved.exists() or any(folder.glob("*/resolved.toml"))
        if not (is_used or StudyShelf([folder]).rows()):
            click.echo(
                visible(f"note: {folder}: no run is there yet; those that `swarmq up` starts there will appear"),
                err=True,
            )
    serve(shown, host=host, port=port, say=say, studies=StudyShelf(folders or (Path(),)))
