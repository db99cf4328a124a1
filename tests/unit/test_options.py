"""Flags, YAML keys and environment variables of a launch, and rejected values."""

from types import SimpleNamespace

import pytest

from hora.launch import options as options_module
from hora.launch.options import Options, all_options


def read(*argv, environ=None):
    printed = {"on_version": lambda: "1.2.3", "on_check_build": lambda: "matrix"}
    examples = ["horovodrun -np 2 python train.py"]
    parser = options_module.build_parser("horovodrun", "Run a command.", examples, **printed)
    return options_module.parse(parser, argv, environ or {})


def parse(*argv, environ=None):
    return read(*argv, environ=environ)[0]


def options(*argv, environ=None):
    return read("-np", "2", *argv, environ=environ)[1]


def test_the_command_starts_at_the_first_word_that_is_not_an_option():
    args = parse("-np", "4", "--tcp", "-H", "a:2,b:2", "python", "train.py", "-np", "9", "--epochs=3", "--", "x")
    assert args.command == ["python", "train.py", "-np", "9", "--epochs=3", "--", "x"]
    assert (args.num_proc, args.hosts) == (4, "a:2,b:2")
    assert parse("-np", "1", "--", "-odd-program", "-x").command == ["-odd-program", "-x"]


def test_nothing_is_exported_unless_requested():
    assert options("python").worker_env() == {}


# Every flag that reaches the workers, with its variable and value there.
EXPORTS = [
    (["--fusion-threshold-mb", "10"], {"HOROVOD_FUSION_THRESHOLD": "10485760"}),
    (["--fusion-threshold-mb", "0"], {"HOROVOD_FUSION_THRESHOLD": "0"}),
    (["--cycle-time-ms", "20"], {"HOROVOD_CYCLE_TIME": "20.0"}),
    (["--cache-capacity", "512"], {"HOROVOD_CACHE_CAPACITY": "512"}),
    (["--hierarchical-allreduce"], {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}),
    (["--no-hierarchical-allreduce"], {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}),
    (["--hierarchical-allgather"], {"HOROVOD_HIERARCHICAL_ALLGATHER": "1"}),
    (["--no-hierarchical-allgather"], {"HOROVOD_HIERARCHICAL_ALLGATHER": "0"}),
    (["--torus-allreduce"], {"HOROVOD_TORUS_ALLREDUCE": "1"}),
    (["--no-torus-allreduce"], {"HOROVOD_TORUS_ALLREDUCE": "0"}),
    (["--autotune-log-file", "a.csv", "--autotune-warmup-samples", "1"], {}),
    (["--autotune", "--autotune-log-file", "a.csv"],
     {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "a.csv"}),
    (["--autotune", "--autotune-warmup-samples", "1", "--autotune-steps-per-sample", "5"],
     {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
      "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "5"}),
    (["--autotune", "--autotune-bayes-opt-max-samples", "7", "--autotune-gaussian-process-noise", "0.5"],
     {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "7",
      "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5"}),
    (["--timeline-mark-cycles"], {}),
    (["--timeline-filename", "t.json"], {"HOROVOD_TIMELINE": "t.json"}),
    (["--timeline-filename", "t.json", "--timeline-mark-cycles"],
     {"HOROVOD_TIMELINE": "t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}),
    (["--no-stall-check"], {"HOROVOD_STALL_CHECK_DISABLE": "1"}),
    (["--stall-check"], {"HOROVOD_STALL_CHECK_DISABLE": "0"}),
    (["--stall-check-warning-time-seconds", "9"], {"HOROVOD_STALL_CHECK_TIME_SECONDS": "9"}),
    (["--stall-check-shutdown-time-seconds", "19"], {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "19"}),
    (["--mpi-threads-disable"], {"HOROVOD_MPI_THREADS_DISABLE": "1"}),
    (["--no-mpi-threads-disable"], {"HOROVOD_MPI_THREADS_DISABLE": "0"}),
    (["--tcp"], {"NCCL_IB_DISABLE": "1"}),
    (["--num-nccl-streams", "2"], {"HOROVOD_NUM_NCCL_STREAMS": "2"}),
    (["--thread-affinity", "1"], {"HOROVOD_THREAD_AFFINITY": "1"}),
    (["--gloo-timeout-seconds", "60"], {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}),
    (["--log-level", "info"], {"HOROVOD_LOG_LEVEL": "INFO"}),
    (["--log-with-timestamp"], {"HOROVOD_LOG_HIDE_TIME": "0"}),
    (["--log-without-timestamp"], {"HOROVOD_LOG_HIDE_TIME": "1"}),
    (["--network-interfaces", "eth1,eth0"],
     {"HOROVOD_GLOO_IFACE": "eth0", "NCCL_SOCKET_IFNAME": "eth0,eth1"}),
    (["--mpi-args=-x --foo", "--binding-args", "core", "--gloo", "-prefix-timestamp", "--verbose"], {}),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "env"), EXPORTS, ids=lambda value: " ".join(value) or "-")
def test_flags_become_variables(argv, env):
    assert options(*argv, "python").worker_env() == env


def test_launcher_flags_have_horovods_names():
    args = parse(
        "--num-proc", "3", "--min-num-proc", "2", "--max-np", "8", "--slots-per-host", "4",
        "--elastic-timeout", "60", "--reset-limit", "0", "--blacklist-cooldown-range", "10", "20",
        "--host-discovery-script", "./d.sh", "-p", "2222", "-i", "/k", "--start-timeout", "5",
        "--output-filename", "out", "--disable-cache", "--gloo", "python",
    )  # fmt: skip
    assert (args.num_proc, args.min_num_proc, args.max_num_proc, args.slots) == (3, 2, 8, 4)
    assert (args.elastic_timeout, args.reset_limit, args.cooldown_range) == (60, 0, [10, 20])
    assert (args.host_discovery_script, args.ssh_port, args.ssh_identity_file) == ("./d.sh", 2222, "/k")
    assert (args.start_timeout, args.output_filename, args.disable_cache) == (5, "out", True)
    assert args.use_gloo is True
    assert not args.use_mpi
    assert Options.from_args(args, {}).elastic


def test_interfaces_are_collected_from_all_their_flags():
    with pytest.warns(DeprecationWarning, match="--network-interfaces"):
        args = parse("-np", "1", "--network-interface", "a,b", "--network-interfaces", "c, d", "python")
    assert args.nics == {"a", "b", "c", "d"}


@pytest.mark.parametrize(("flag", "shown"), [("--log-hide-timestamp", False), ("--no-log-hide-timestamp", True)])
def test_old_timestamp_flags_warn_and_work(flag, shown):
    with pytest.warns(DeprecationWarning, match=flag):
        assert parse("-np", "1", flag, "python").log_with_timestamp is shown


def test_environment_variables_replace_missing_flags():
    environ = {"HOROVOD_START_TIMEOUT": "7", "HOROVOD_ELASTIC_TIMEOUT": "9"}
    assert options("python", environ=environ).effective("start_timeout") == 7
    assert options("--start-timeout", "3", "python", environ=environ).effective("start_timeout") == 3
    assert options("python", environ=environ).effective("elastic_timeout") == 9
    assert options("python").effective("start_timeout") == 30
    with pytest.raises(ValueError, match="HOROVOD_START_TIMEOUT must be an integer, but it is 'soon'"):
        options("python", environ={"HOROVOD_START_TIMEOUT": "soon"})


@pytest.mark.parametrize(
    "argv",
    [
        ["--fusion-threshold-mb", "-1"], ["--cycle-time-ms", "-0.5"], ["--cycle-time-ms", "nan"],
        ["--cycle-time-ms", "inf"], ["--num-proc", "99999999"],
        ["--cache-capacity", "-1"], ["--autotune-warmup-samples", "-1"],
        ["--autotune-steps-per-sample", "-1"],
        ["--autotune-bayes-opt-max-samples", "-1"], ["--autotune-gaussian-process-noise", "1.1"],
        ["--autotune-gaussian-process-noise", "-0.1"], ["--stall-check-warning-time-seconds", "-1"],
        ["--stall-check-shutdown-time-seconds", "-1"], ["--num-nccl-streams", "-1"],
        ["--thread-affinity", "-1"],
        ["--gloo-timeout-seconds", "-1"], ["--ssh-port", "70000"], ["--reset-limit", "-1"],
        ["--start-timeout", "0"],
        ["--blacklist-cooldown-range", "0", "10"], ["--blacklist-cooldown-range", "1", "3601"],
        ["--blacklist-cooldown-range", "20", "10"], ["--log-level", "LOUD"],
        ["--min-np", "3"], ["--max-np", "1"],
        ["--num-proc", "0"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_out_of_range_values_are_rejected_by_name(argv):
    flag = "-np" if argv[0] == "--num-proc" else argv[0]
    with pytest.raises(ValueError, match=flag) as caught:
        parse("-np", "2", *argv, "python")
    assert any(value in str(caught.value) for value in argv[1:])


@pytest.mark.parametrize("flag", ["--mpi", "--jsrun"])
def test_unavailable_controllers_are_rejected(flag):
    with pytest.raises(ValueError, match=f"{flag}: MPI support has not been built"):
        parse("-np", "2", flag, "python")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["python", "train.py"], "-np is missing"),
        (["-np", "two", "python"], "invalid int value: 'two'"),
        (["-np", "2.5", "python"], "invalid int value: '2.5'"),
        (["-np", "2", "--no-such-flag", "python"], "unrecognized arguments: --no-such-flag"),
        (["-np", "2", "-H", "a:1", "-hostfile", "f", "python"], "not allowed with argument"),
        (["-np", "2", "-H", "a:1", "--host-discovery-script", "f", "python"], "not allowed with argument"),
        (["-np", "2", "--gloo", "--mpi", "python"], "not allowed with argument"),
        (["-np", "2", "--autotune", "--no-autotune", "python"], "not allowed with argument"),
        (["-np", "2", "--torus-allreduce", "--no-torus-allreduce", "python"], "not allowed with argument"),
        (["-np", "2", "-prefix-timestamp", "--log-with-timestamp", "python"], "not allowed with argument"),
        (["-np", "2", "--network-interfaces", ",", "python"], "names no interface"),
    ],
)
def test_bad_command_lines_end_with_status_2_and_no_traceback(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert len(message.splitlines()) == 2  # the usage line and the error


def test_version_and_check_build_need_no_number_of_processes(capsys):
    for flag, text in (
        ("-v", "1.2.3"),
        ("--version", "1.2.3"),
        ("-cb", "matrix"),
        ("--check-build", "matrix"),
    ):
        with pytest.raises(SystemExit) as caught:
            parse(flag)
        assert caught.value.code == 0
        assert capsys.readouterr().out == text + "\n"


def test_an_lsf_job_needs_no_number_of_processes():
    assert parse("python", environ={"LSB_JOBID": "12"}).num_proc is None


CONFIG = """
controller: gloo
params: {fusion_threshold_mb: 32, cycle_time_ms: 10, cache_capacity: 2048, hierarchical_allreduce: true,
         hierarchical_allgather: true, torus_allreduce: false, ports: 20000-20100, no_such_thing: 3}
autotune: {enabled: true, log_file: a.txt, warmup_samples: 5, steps_per_sample: 20,
           bayes_opt_max_samples: 50, gaussian_process_noise: 0.9}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: true, warning_time_seconds: 120, shutdown_time_seconds: 240}
library_options: {mpi_threads_disable: true, replace_gloo: true, num_nccl_streams: 2, thread_affinity: 1,
                  gloo_timeout_seconds: 60}
logging: {level: INFO, with_timestamp: false, full_traceback: true}
unknown: [1, 2]
"""


def test_a_config_file_sets_every_option_that_has_a_key(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    chosen = options("--config-file", str(path), "python")
    with_key = {name for name, option in all_options().items() if option.yaml}
    assert {name for name in with_key if getattr(chosen, name) is None} == set()
    assert chosen.use_gloo is True
    assert chosen.no_stall_check is False
    assert chosen.log_with_timestamp is False
    assert chosen.worker_env() == {
        "HOROVOD_FUSION_THRESHOLD": str(32 * 1024 * 1024), "HOROVOD_CYCLE_TIME": "10.0",
        "HOROVOD_CACHE_CAPACITY": "2048", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_HIERARCHICAL_ALLGATHER": "1", "HOROVOD_TORUS_ALLREDUCE": "0", "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "a.txt", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "5",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "20", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "50",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.9", "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1", "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240",
        "HOROVOD_MPI_THREADS_DISABLE": "1", "HOROVOD_NUM_NCCL_STREAMS": "2", "HOROVOD_THREAD_AFFINITY": "1",
        "HORA_REPLACE_GLOO": "1", "HORA_PORTS": "20000-20100",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60", "HOROVOD_LOG_LEVEL": "INFO", "HOROVOD_LOG_HIDE_TIME": "1",
        "HORA_FULL_TRACEBACK": "1",
    }  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
def test_flags_take_precedence_over_the_file_in_any_order(tmp_path, first):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    mine = ["--fusion-threshold-mb", "1", "--no-autotune", "--no-stall-check", "--log-with-timestamp"]
    file = ["--config-file", str(path)]
    env = options(*(mine + file if first else file + mine), "python").worker_env()
    assert env["HOROVOD_FUSION_THRESHOLD"] == "1048576"
    assert env["HOROVOD_AUTOTUNE"] == "0"
    assert "HOROVOD_AUTOTUNE_LOG" not in env
    assert env["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert env["HOROVOD_LOG_HIDE_TIME"] == "0"


def test_a_controller_flag_overrides_the_files_controller(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("controller: mpi\n")
    assert options("--gloo", "--config-file", str(path), "python").use_mpi is None
    with pytest.raises(ValueError, match="has not been built"):
        options("--config-file", str(path), "python")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("params: {fusion_threshold_mb: -1}",
         "params.fusion_threshold_mb in .* must be at least 0, but it is -1"),
        ("params: {fusion_threshold_mb: big}", "must be an integer, but it is 'big'"),
        ("params: {fusion_threshold_mb: 1.5}", "must be an integer, but it is 1.5"),
        ("params: {fusion_threshold_mb: true}", "must be an integer, but it is True"),
        ("params: {hierarchical_allreduce: 3}", "must be true or false, but it is 3"),
        ("autotune: {gaussian_process_noise: 2}", "must be at most 1, but it is 2"),
        ("timeline: {filename: [a]}", "must be a text"),
        ("logging: {level: LOUD}", "must be one of TRACE"),
        ("params: 3", "params in .* must hold"),
        ("controller: nccl", "must be gloo or mpi, but it is 'nccl'"),
        ("controller: [gloo]", "must be gloo or mpi, but it is \\['gloo'\\]"),
        ("- a\n- b\n", "must hold"),
        ("params: {a: ", "is not YAML"),
    ],
)  # fmt: skip
def test_bad_config_files_name_the_key(tmp_path, text, words):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        options("--config-file", str(path), "python")


def test_a_missing_config_file_is_named_and_an_empty_one_is_valid(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        options("--config-file", str(tmp_path / "none.yaml"), "python")
    (tmp_path / "empty.yaml").write_text("")
    assert options("--config-file", str(tmp_path / "empty.yaml"), "python").worker_env() == {}


def test_any_object_with_the_attributes_is_accepted_and_validated():
    args = SimpleNamespace(
        num_proc="3",
        hosts="localhost:3",
        use_gloo=True,
        use_mpi=False,
        nics={"lo"},
        verbose=2,
        command=["python", "-V"],
    )
    chosen = Options.from_args(args, {})
    assert chosen.verbose is True
    assert (chosen.num_proc, chosen.command, chosen.nics) == (3, ("python", "-V"), frozenset({"lo"}))
    args.num_proc = "three"
    with pytest.raises(ValueError, match="-np must be an integer, but it is 'three'"):
        Options.from_args(args, {})
    args.num_proc, args.hostfile = 3, "f"
    with pytest.raises(ValueError, match="--hosts and --hostfile exclude one another"):
        Options.from_args(args, {})


def test_no_variable_flag_or_key_is_used_twice():
    for values in (
        [option.variable for option in all_options().values() if option.variable],
        [option.yaml for option in all_options().values() if option.yaml],
        [flag for option in all_options().values() for flag in (*option.flags, *option.off_flags)],
    ):
        assert len(values) == len(set(values))


def test_options_without_effect_are_named_with_the_reason():
    noise = ["--autotune", "--autotune-gaussian-process-noise", "0.5"]
    asked = [*noise, "--cycle-time-ms", "2", "--max-np", "4", "--disable-cache"]
    assert options(*asked, "python", environ={"HOROVOD_ELASTIC_TIMEOUT": "9"}).without_effect() == [
        "--cycle-time-ms: without effect, there is no cycle to wait for; ranks with news wake the others",
        "--autotune-gaussian-process-noise: without effect, trials are compared directly, without a model of their "
        "noise",
        "--max-num-proc: without effect, the job is not elastic; make it so with --min-np or --host-discovery-script",
    ]
    assert options("--min-np", "1", "--max-np", "4", "--fusion-threshold-mb", "1", "python").without_effect() == []


def test_the_short_help_has_examples_and_common_options_and_mentions_the_long_one(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "Run a command.\n\nexamples:\n  horovodrun -np 2 python train.py\n" in text
    for flag in ("-np N", "-H HOST:SLOTS", "--dashboard", "--min-np N"):
        assert flag in text
    assert "--fusion-threshold-mb" not in text
    assert "horovodrun --help-all shows all" in text


def test_the_long_help_ends_with_the_options_that_have_no_effect(capsys):
    with pytest.raises(SystemExit):
        parse("--help-all")
    before, _, after = capsys.readouterr().out.partition("options of Horovod that have no effect here")
    idle = [option.flags[0] for option in all_options().values() if option.idle]
    assert idle
    assert all(flag in after and flag not in before for flag in idle)


def test_help_shows_no_hidden_flag(capsys):
    with pytest.raises(SystemExit):
        parse("--help-all")
    text = capsys.readouterr().out
    assert "--fusion-threshold-mb MB" in text
    assert "log-hide-timestamp" not in text
