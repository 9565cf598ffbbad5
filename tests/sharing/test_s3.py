"""A store in a bucket: the moto server on this machine's loopback, real DVC with its S3 plugin."""

import importlib.util
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.sharing.test_share import join, share, team
from tests.sweep import small

NEEDED = ("dvc_s3", "moto", "boto3", "flask")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in NEEDED),
        reason="the extra s3 or moto[server] is not installed",
    ),
]
KEYS = {"access_key_id": "someone", "secret_access_key": "hunter2"}


@pytest.fixture
def server():
    """The address of an S3 server with one bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _put(f"{address}/bucket")
        yield address
    finally:
        process.terminate()
        process.wait()


def _put(address):
    """Make a bucket once the server answers."""
    until = time.monotonic() + 90
    while True:
        try:
            request = urllib.request.Request(address, method="PUT")
            urllib.request.urlopen(request, timeout=30).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def with_keys(project):
    """This machine's keys, where they belong."""
    for key, value in KEYS.items():
        project.run("dvc", "remote", "modify", "--local", "store", key, value)


def empty(server):
    """Take every output out of the bucket; DVC's run cache stays."""
    import boto3

    words = {f"aws_{key}": value for key, value in KEYS.items()}
    bucket = boto3.resource("s3", endpoint_url=server, region_name="us-east-1", **words).Bucket(
        "bucket"
    )
    kept = list(bucket.objects.filter(Prefix="folder/files/md5/"))
    assert kept
    for one in kept:
        one.delete()


def test_a_bucket_is_a_store_and_keys_stay_on_each_machine(server, tmp_path):
    source = small.make(tmp_path / "project", tmp_path / "home")
    source.run("python", "-m", "stages.compose")
    source.repro()
    source.run("dvc", "remote", "add", "-d", "store", "s3://bucket/folder")
    source.run("dvc", "remote", "modify", "store", "endpointurl", server)
    with_keys(source)
    source.commit()
    made = team(tmp_path, source)
    assert "s3://bucket/folder" in share(made.one).output
    two = made.clone("two")
    assert "hunter2" not in two.run("git", "log", "-p", "--", ".dvc").output
    with_keys(two)
    assert "`dvc repro --pull` runs nothing" in join(two).output
    assert two.repro("--pull").stages == []
    empty(server)
    three = made.clone("three")
    with_keys(three)
    done = join(three, check=False)
    assert done.status == 2
    assert "The store lacks files" in done.output
    assert "reports/train" in done.output
