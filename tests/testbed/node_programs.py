"""containerd, kubelet, kube-proxy and CoreDNS of a one-node cluster: their configuration and their start."""

import json
import subprocess
from pathlib import Path

from testbed import fair_cores
from testbed.cluster_state import CNI_NETWORK
from testbed.control_plane import Programs
from testbed.ports import is_open
from testbed.prepare.go_programs import program
from testbed.process import NotReadyError

NODE = "node-1"
NODE_ADDRESS = "198.18.255.1"
"""On the loopback interface: reachable for pods, not for anybody outside the machine."""

POD_NETWORK = "198.18.0.0/16"
POD_ADDRESSES = "198.18.0.0/17"
DNS_ADDRESS = "198.19.0.10"
CNI_PROGRAMS = Path("/usr/lib/cni")


def start_containerd(programs: Programs, pause_image: str) -> None:
    """Start containerd and wait until it answers.

    Args:
        programs: what starts and records it.
        pause_image: reference of the image that holds pods' namespaces.
    """
    folder = programs.state.folder
    (folder / "cni").mkdir(exist_ok=True)
    address_management = {
        "type": "host-local",
        "ranges": [[{"subnet": POD_ADDRESSES}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    network = {
        "cniVersion": "0.4.0",
        "name": CNI_NETWORK,
        "plugins": [
            {"type": "ptp", "ipam": address_management},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
    (folder / "cni" / "10-testbed.conflist").write_text(json.dumps(network, indent=1))
    defaults = fair_cores.container_defaults(program("ctr"), folder / "container.json")
    base = f'base_runtime_spec = "{defaults}"' if defaults else ""
    # restrict_oom_score_adj works without CAP_SYS_RESOURCE, as in many virtual machines and containers.
    (folder / "containerd.toml").write_text(
        f"""\
version = 3
root = "{folder}/containerd/root"
state = "{folder}/containerd/state"
[grpc]
  address = "{_socket(folder)}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{pause_image}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  {base}
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  BinaryName = "{program("runc")}"
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{CNI_PROGRAMS}"]
  conf_dir = "{folder}/cni"
"""
    )
    containerd = programs.start("containerd", "--config", folder / "containerd.toml")
    programs.wait(
        containerd,
        lambda: _socket(folder).exists() and _ctr(folder, "version").returncode == 0,
        seconds=30,
        what="answer on its socket",
    )


def import_image(folder: Path, archive: Path) -> None:
    """Give an OCI archive to containerd.

    Raises:
        NotReadyError: with containerd's answer.
    """
    answer = _ctr(folder, "--namespace", "k8s.io", "image", "import", "--local", str(archive))
    if answer.returncode != 0:
        raise NotReadyError(f"containerd did not import {archive}: {answer.stderr.strip()}")


def start_node(programs: Programs, kubeconfig: Path) -> None:
    """Start kubelet, kube-proxy and CoreDNS; containerd must be running.

    Raises:
        NotReadyError: if CoreDNS is not there in time. The node's readiness is for the caller to await.
    """
    folder = programs.state.folder
    configuration = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": f"unix://{_socket(folder)}",
        "failSwapOn": False,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "address": NODE_ADDRESS,
        "healthzBindAddress": "127.0.0.1",
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "enforceNodeAllocatable": [],
        "registerWithTaints": [],
        "podLogsDir": str(folder / "pod-logs"),
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
    }
    (folder / "kubelet.json").write_text(json.dumps(configuration, indent=1))
    programs.start(
        "kubelet",
        f"--kubeconfig={kubeconfig}",
        f"--config={folder / 'kubelet.json'}",
        f"--root-dir={folder / 'kubelet'}",
        f"--hostname-override={NODE}",
        f"--node-ip={NODE_ADDRESS}",
    )
    programs.start(
        "kube-proxy",
        f"--kubeconfig={kubeconfig}",
        "--proxy-mode=iptables",
        f"--cluster-cidr={POD_NETWORK}",
        f"--hostname-override={NODE}",
        "--conntrack-max-per-core=0",
        "--healthz-bind-address=127.0.0.1:10256",
        "--metrics-bind-address=127.0.0.1:10249",
    )
    (folder / "Corefile").write_text(
        f"""\
.:53 {{
  bind {DNS_ADDRESS}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig}
    ttl 1
  }}
}}
"""
    )
    dns = programs.start("coredns", "-conf", folder / "Corefile")
    programs.wait(dns, lambda: is_open(53, DNS_ADDRESS), seconds=30, what="listen")


def _socket(folder: Path) -> Path:
    return folder / "containerd.sock"


def _ctr(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(program("ctr")), "--address", str(_socket(folder)), *words],
        capture_output=True,
        text=True,
        check=False,
    )
