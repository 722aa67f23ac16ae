"""Authorization of HTTP servers, and the errors of one that cannot start."""

import socket

import pytest

from rally.services.http_server import ServeError, check_exposure, check_free, serve


def test_other_machines_are_served_only_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLY_TEST_TOKEN", raising=False)
    for host in ("127.0.0.1", "localhost", "::1"):
        assert check_exposure(host, "RALLY_TEST_TOKEN") is None
    for host in ("0.0.0.0", "::", "10.0.0.7", "search.example"):
        with pytest.raises(ServeError, match="set RALLY_TEST_TOKEN"):
            check_exposure(host, "RALLY_TEST_TOKEN")
    monkeypatch.setenv("RALLY_TEST_TOKEN", "secret")
    assert check_exposure("0.0.0.0", "RALLY_TEST_TOKEN") == "secret"


def test_a_port_that_is_taken_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"port {port} .Address already in use.; choose another --port or --host"):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)
    check_free("localhost", 0)
    with pytest.raises(ServeError, match=r"cannot use no\.such\.invalid, port 80 .*; choose another --port or --host"):
        check_free("no.such.invalid", 80)


def test_a_name_of_several_addresses_is_free_only_if_all_are_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*hosts: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in hosts]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        named("127.0.0.1", "127.0.0.2")
        with pytest.raises(ServeError, match="Address already in use"):
            check_free("name", port)
    check_free("name", port)
    named("192.0.2.1", "127.0.0.1")
    check_free("name", port)  # as on a machine without IPv6
    named("192.0.2.1")
    with pytest.raises(ServeError, match="Cannot assign"):
        check_free("name", port)


def test_a_missing_package_is_named_with_its_cure() -> None:
    def create() -> object:
        raise ModuleNotFoundError("no", name="fastapi")

    with pytest.raises(ServeError, match=r"needs the package fastapi; run: pip install 'rally-rl\[services\]'"):
        serve(create, "127.0.0.1", 0)
