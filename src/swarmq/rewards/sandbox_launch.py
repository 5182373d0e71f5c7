"""Program that confines itself and then becomes the untrusted program. Runs as a script, without swarmq.

bubblewrap:         launch, which watches ─fork, exec─> bwrap ─ its first process ─ launch: limits, uid, system calls ─exec─> program
landlock, rlimits:  launch, which watches ─fork─> launch: limits, uid, files, system calls ─exec─> program

The watching process is the parent of every orphan (a subreaper). When the program ends, or when the worker closes the control pipe
or dies, it kills and reaps all that is left, and removes the program's folder.

On the status pipe: `ready` says that everything up to here worked, and that what follows is the program's doing; the next line is
the program's exit code, or why there is none.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import signal
import struct
import sys
import time

TYPE_CHECKING = False  # every import costs each sandbox time
if TYPE_CHECKING:
    from typing import Any

OPEN_FILES = 64
REAP_MS = 10
"""Milliseconds between two searches for orphans to reap."""
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
CLONE_NEW = 0x7E020000
"""All flags of clone that make a namespace."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
EPERM, ENOSYS = 1, 38
FAMILIES = (1, 2, 10)
"""Address families of which a program may open sockets: Unix, IPv4, IPv6. Others reach beyond a network namespace (vsock) or
only widen the kernel's surface."""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALWAYS_DENIED = {
    # x86_64, aarch64: calls that look into other processes, leave the sandbox, hold memory that no limit counts, or set up the
    # machine. None of them is needed by a program that computes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "quotactl": (179, 60),
    "personality": (135, 92), "fanotify_init": (300, 262), "syslog": (103, 116), "vhangup": (153, 58),
}  # fmt: skip
WITHOUT_NAMESPACES = {
    # Landlock cannot refuse these.
    "socket": (41, 198), "truncate": (76, 45), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "pidfd_open": (434, 434),
}  # fmt: skip
WITH_OWN_UID = {
    # The program runs as the worker's user, whose processes and files it must not touch.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
}  # fmt: skip
WITH_OWN_UID_X86 = {"chmod": 90, "chown": 92, "lchown": 94, "utime": 132, "utimes": 235, "futimesat": 261}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    plan_fd = int(sys.argv[1])
    with os.fdopen(plan_fd, "rb", closefd=False) as source:
        source.seek(0)
        plan = marshal.load(source)  # noqa: S302 - from the worker; json would take longer to import than all the rest
    if sys.argv[2:] == ["inside"]:
        confine_and_exec(plan)
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")
    program = os.fork()
    if not program:
        try:
            os.setsid()
            if plan["wrapped"]:
                os.execve(plan["wrapped"][0], plan["wrapped"], {})
            confine_and_exec(plan)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(127)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the worker is the signal
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2, *plan["keep_fds"]):
        os.dup2(nowhere, fd)
    ended = watch(program, plan)
    try:
        os.write(plan["status_fd"], f"\n{ended}".encode())
    except OSError:  # the worker is dead
        pass
    kill_descendants(plan["uid"] if plan["isolation"] != "bubblewrap" else None)
    if plan["isolation"] != "bubblewrap":
        remove_folder(plan["folder"])
    os._exit(0)


def watch(program: int, plan: dict[str, Any]) -> str:
    """Reap orphans until the program ends, or until the worker asks to end it. Return the program's exit code."""
    events = select.poll()
    for fd in (plan["control_fd"], os.pidfd_open(program)):
        events.register(fd, select.POLLIN)
    while True:
        if any(fd == plan["control_fd"] for fd, _ in events.poll(REAP_MS)):
            return str(128 + signal.SIGKILL)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == program:
                if plan["wrapped"] and os.WIFSIGNALED(
                    status
                ):  # bwrap ends with an exit code, also for a killed program
                    return f"bwrap was ended by signal {os.WTERMSIG(status)}"
                return str(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
            if not pid:
                break


def kill_descendants(uid: int | None) -> None:
    """Kill all processes below this one. Orphans become its children, so the work is done when there are none."""
    while True:
        if uid is not None:
            kill_processes_of(uid)
        else:
            for pid in find_descendants():
                try:
                    resource.prlimit(pid, resource.RLIMIT_NPROC, (0, 0))  # it can fork no more
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def kill_processes_of(uid: int) -> None:
    try:
        killer = os.fork()
    except OSError:  # no further process for now
        return
    if not killer:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)  # all that this user may signal, which are the processes of this sandbox
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def remove_folder(folder: str) -> None:
    """Remove a folder that a hostile program filled. Calls `rm`, which follows no links and copes with any depth."""
    modes = [["chmod", "-R", "u+rwX", "--", folder]] if os.geteuid() else []
    for command in (*modes, ["rm", "-rf", "--", folder]):
        os.waitpid(os.posix_spawnp(command[0], command, os.environ), 0)


def find_descendants() -> list[int]:
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    stat = file.read()
            except OSError:
                continue
            parents[int(entry)] = int(stat[stat.rindex(b")") + 2 :].split()[1])
    mine, found = os.getpid(), []
    for pid in parents:
        above = pid
        while above in parents and above != mine:
            above = parents[above]
        if above == mine and pid != mine:
            found.append(pid)
    return found


def confine_and_exec(plan: dict[str, Any]) -> None:
    limits, uid, isolation = plan["limits"], plan["uid"], plan["isolation"]
    keep = plan["keep_fds"]
    for name in os.listdir("/proc/self/fd"):
        if (fd := int(name)) > 2 and fd not in keep:
            try:
                os.set_inheritable(fd, False)
            except OSError:
                pass
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    processes = limits["processes"]
    if uid is None and isolation != "bubblewrap":
        processes += 256 + count_threads_of(
            os.getuid()
        )  # the kernel counts all of this user's; the worker counts exactly
    for name, value in (
        ("CPU", max(1, round(limits["cpu_s"] + 0.5))), ("AS", limits["memory_bytes"]), ("FSIZE", limits["file_bytes"]),
        ("NOFILE", OPEN_FILES), ("NPROC", processes), ("CORE", 0), ("MEMLOCK", 0), ("MSGQUEUE", 0),
    ):  # fmt: skip
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    os.umask(0o022)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    os.chdir(plan["folder"])
    for name, content in plan["files"].items():
        if parent := os.path.dirname(name):
            os.makedirs(parent, exist_ok=True)
        with open(name, "x", newline="", encoding="utf-8", errors="surrogatepass") as file:
            file.write(content)
    if isolation == "landlock":
        restrict_files(plan["readable"], plan["folder"])
    try:
        install_filter(isolation != "bubblewrap", uid is None and isolation != "bubblewrap")
    except OSError:
        if isolation != "rlimits":
            raise
    os.write(plan["status_fd"], b"ready")
    try:
        os.execve(plan["command"][0], plan["command"], plan["environment"])
    except OSError as error:
        os.write(plan["status_fd"], f": {plan['command'][0]}: {error}".encode())
        os._exit(127)


def count_threads_of(uid: int) -> int:
    number = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.stat(f"/proc/{entry}").st_uid == uid:
                    number += len(os.listdir(f"/proc/{entry}/task"))
            except OSError:
                pass
    return number


def restrict_files(readable: list[str], writable: str) -> None:
    """Let this process and its children read and write below these paths alone (Landlock)."""
    abi = check(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)), "landlock")
    bits = 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)
    everything = (1 << bits) - 1
    of_a_file = everything & 0b1100_0000_0000_0111  # execute, write, read, truncate, ioctl
    read = 0b1101  # execute, read a file, list a folder
    attributes = struct.pack("=QQQ", everything, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = check(libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)), "landlock")
    rules = [(path, read) for path in readable] + [(writable, everything & ~(1 << 6 | 1 << 11))]
    rules += [("/dev/null", of_a_file), ("/dev/zero", read), ("/dev/urandom", read), ("/dev/random", read)]
    for path, allowed in rules:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = allowed if os.path.isdir(path) else allowed & of_a_file
        rule = struct.pack("=Qi", allowed, fd)
        check(libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, ctypes.c_uint32(0)), f"landlock rule for {path}")
        os.close(fd)
    check(libc.syscall(LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0)), "landlock")
    os.close(ruleset)


def install_filter(without_namespaces: bool, with_own_uid: bool) -> None:
    """Refuse system calls (seccomp). For other architectures, or without seccomp, raises OSError."""
    program = build_filter(os.uname().machine, without_namespaces, with_own_uid)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    check(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")


def build_filter(machine: str, without_namespaces: bool, with_own_uid: bool) -> bytes:
    if machine not in AUDIT_ARCH:
        raise OSError(f"no list of system calls for {machine}")
    column = 0 if machine == "x86_64" else 1
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, refuse, unknown = 0x80000000, 0x7FFF0000, 0x00050000 | EPERM, 0x00050000 | ENOSYS
    argument = (16, 24)  # offsets of the low halves of the first two

    code: list[tuple[int, int, int, int]] = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[machine]), (give, 0, 0, kill)]
    code += [(load, 0, 0, 0)]
    if machine == "x86_64":
        code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # the x32 numbers
    denied = [numbers[column] for numbers in ALWAYS_DENIED.values()]
    if without_namespaces:
        denied += [numbers[column] for numbers in WITHOUT_NAMESPACES.values()]
    if with_own_uid:
        denied += [numbers[column] for numbers in WITH_OWN_UID.values()]
        denied += list(WITH_OWN_UID_X86.values()) if machine == "x86_64" else []
    for number in denied:
        code += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    code += [
        (equal, 0, 1, 435),
        (give, 0, 0, unknown),
    ]  # clone3, whose flags a filter cannot read; libc falls back to clone

    def only(number: int, which: int, tests: list[tuple[int, int]], if_true: int, if_false: int) -> None:
        body = [(load, 0, 0, argument[which])]
        for test, value in tests:
            body += [(test, 0, 1, value), (give, 0, 0, if_true)]
        body += [(give, 0, 0, if_false)]
        code.extend([(equal, 0, len(body), number), *body])

    only((56, 220)[column], 0, [(any_bit, CLONE_NEW)], refuse, allow)
    only((16, 29)[column], 1, [(equal, TIOCSTI), (equal, TIOCLINUX)], refuse, allow)
    only((302, 261)[column], 0, [(equal, 0)], allow, refuse)  # prlimit of another process
    if not without_namespaces:
        only((41, 198)[column], 0, [(equal, family) for family in FAMILIES], allow, refuse)
    code += [(give, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


if __name__ == "__main__":
    main()
