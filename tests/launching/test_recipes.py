"""The launch recipes in examples/cluster: their syntax, their names, and what they must never do.

What was checked beside these tests, once, with what is not installed here: docs/scaling.md, "Launching".
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
SLURM, KUBERAY, SKYPILOT = FOLDER / "slurm.sbatch", FOLDER / "kuberay.yaml", FOLDER / "skypilot.yaml"
RECIPES = [SLURM, KUBERAY, SKYPILOT]

# Long options of sbatch(1) that a job of this kind may need; Slurm 24.11.
SBATCH = {
    "account", "array", "chdir", "comment", "constraint", "cpus-per-gpu", "cpus-per-task", "dependency", "error",
    "exclusive", "export", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name", "mail-type", "mem",
    "mail-user", "mem-per-cpu", "mem-per-gpu", "no-requeue", "nodelist", "nodes", "ntasks", "ntasks-per-node",
    "open-mode", "output", "partition", "qos", "requeue", "reservation", "signal", "switches", "time", "wait-all-nodes",
}  # fmt: skip
# Fields of SkyPilot's task (0.14.1) and of KubeRay's RayJob (v1) that are used here.
SKY = {"name", "num_nodes", "resources", "envs", "secrets", "workdir", "file_mounts", "setup", "run"}
RAYJOB = {
    "entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "submissionMode",
    "submitterPodTemplate", "rayClusterSpec",
}  # fmt: skip


def scripts() -> dict[str, str]:
    """Return name to text of every shell script: the batch file, and those inside of the YAML."""
    task = yaml.safe_load(SKYPILOT.read_text())
    return {"slurm": SLURM.read_text(), "sky run": task["run"], "sky setup": task["setup"]}


def kubernetes() -> dict[str, Any]:
    """Return the manifests by their kind."""
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(KUBERAY.read_text())}


@pytest.mark.parametrize("name", ["slurm", "sky run", "sky setup"])
def test_scripts_are_bash(name: str):
    """`bash -n` reads each to its end."""
    ran = subprocess.run(["bash", "-n"], input=scripts()[name], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", ["slurm", "sky run", "sky setup"])
def test_shellcheck_finds_nothing(name: str):
    """No quoting mistake, no variable that is never set."""
    command = [str(Path(sys.prefix) / "bin" / "shellcheck"), "--shell=bash", "--exclude=SC2329", "-"]
    ran = subprocess.run(command, input=scripts()[name], capture_output=True, text=True, check=False)
    assert ran.stdout == ""


def test_slurm_directives_are_slurms():
    """Each #SBATCH line has a long option of sbatch; all stand before the first command, where Slurm looks."""
    lines = SLURM.read_text().splitlines()
    places = [place for place, line in enumerate(lines) if line.startswith("#SBATCH")]
    named = [re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", lines[place]) for place in places]
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))

    assert len(named) > 5
    assert {found[1] if found else "not an option" for found in named} <= SBATCH
    assert max(places) < first_command


def test_a_job_that_runs_out_of_time_is_requeued_after_its_checkpoint():
    """Slurm warns the batch script alone (B:), early enough for a checkpoint; the log is appended to."""
    text = SLURM.read_text()

    for words in ("--signal=B:TERM@300", "--requeue", "--open-mode=append", 'kill -TERM "$gnomon"', "scontrol requeue"):
        assert words in text


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_cluster_is_authenticated_and_no_secret_is_in_the_file(recipe: Path):
    """Token mode, and the token comes from a file, a Secret or the launcher's own environment."""
    text = recipe.read_text()

    assert re.search(r"RAY_AUTH_MODE=token|authOptions:\n\s+mode: token", text)
    assert not re.search(r"RAY_AUTH_TOKEN[=:] *['\"]?[0-9a-zA-Z]{8,}", text)
    assert not re.search(r"[0-9a-f]{32}", text)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_no_dashboard_is_open_to_others(recipe: Path):
    """Where the recipe starts Ray itself it starts no dashboard; Kubernetes keeps it inside and behind a policy."""
    text = recipe.read_text()
    heads = re.findall(r"ray start --head.*", text)

    assert all("--include-dashboard=false" in head for head in heads)
    assert "0.0.0.0" not in text
    assert "dashboard-host" not in text
    assert "ports:" not in text
    assert heads or recipe == KUBERAY


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_run_goes_on_where_its_folder_has_one(recipe: Path):
    """The same command begins and resumes; the cluster is the one that is there."""
    text = recipe.read_text()

    assert re.search(r"experiment\.toml", text)
    assert "gnomon resume" in text
    assert "--cluster auto" in text
    assert text.index("gnomon resume") < text.index("gnomon train")


def test_the_ray_job_has_kuberays_fields():
    """Version, kind and fields of the published CRD; every pod has the run's disk or submits; limits equal requests."""
    job = kubernetes()["RayJob"]
    spec = job["spec"]
    pods = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]

    assert job["apiVersion"] == "ray.io/v1"
    assert set(spec) <= RAYJOB
    for pod in pods:
        (container,) = pod["template"]["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert {"runs", "shm"} <= mounted <= {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]


def test_only_pods_of_the_run_and_the_operator_reach_its_pods():
    """The policy selects the label that every pod of the job has, and lets in the same label and KubeRay's operator."""
    found = kubernetes()
    spec, policy = found["RayJob"]["spec"], found["NetworkPolicy"]["spec"]
    label = policy["podSelector"]["matchLabels"]
    cluster = spec["rayClusterSpec"]
    templates = [
        spec["submitterPodTemplate"],
        cluster["headGroupSpec"]["template"],
        *(group["template"] for group in cluster["workerGroupSpecs"]),
    ]

    assert all(label.items() <= template["metadata"]["labels"].items() for template in templates)
    assert policy["ingress"][0]["from"][0] == {"podSelector": {"matchLabels": label}}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"


def test_the_disk_is_shared():
    """Whichever pod goes on reads the checkpoint: ReadWriteMany; the claim has the name that pods mount."""
    found = kubernetes()
    claim = found["PersistentVolumeClaim"]
    volumes = found["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]

    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["name"] in [
        volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume
    ]


def test_the_sky_task_has_skypilots_fields():
    """Known fields; the secret has no value in the file; Ray is not the one that SkyPilot runs on port 6380."""
    task = yaml.safe_load(SKYPILOT.read_text())

    assert set(task) == SKY
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}
    assert "6380" not in task["run"]
    assert "6379" not in task["run"]


def test_no_recipe_ends_the_ray_of_others():
    """`ray stop` ends every Ray that a machine has, SkyPilot's own among them: what a script started it ends itself."""
    for text in scripts().values():
        assert not re.search(r"^[^#]*\bray stop\b", text, flags=re.MULTILINE)
