"""Settings: every variable is read, every mistake is named at once."""

from __future__ import annotations

import dataclasses

import pytest

from kvshare_operator import settings
from kvshare_operator.core.server_version import read_version


def test_every_field_has_a_variable_and_defaults_work() -> None:
    """The chart sets only what differs."""
    assert set(settings._READERS) == {field.name for field in dataclasses.fields(settings.Settings)}
    assert settings.read_settings({}) == settings.Settings()


def test_report_url_and_names_come_from_the_release() -> None:
    """Nothing is a constant that the release's name decides."""
    found = settings.read_settings({"KVSHARE_NAMESPACE": "n", "KVSHARE_SERVICE": "s"})
    assert found.report_url == "https://s.n.svc:9444/v1/report"
    assert "s.n.svc" in found.dns_names


def test_all_mistakes_are_named_at_once() -> None:
    """Given and expected, for each variable."""
    wrong = {"KVSHARE_REPORT_PORT": "x", "KVSHARE_LOG_LEVEL": "LOUD", "KVSHARE_CERTIFICATE_MODE": "None"}
    with pytest.raises(settings.SettingsError) as caught:
        settings.read_settings(wrong)
    assert all(variable in str(caught.value) for variable in wrong)


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ({"major": "1", "minor": "36"}, (1, 36)),
        ({"major": "1", "minor": "36+"}, (1, 36)),
        ({"gitVersion": "v1.31.4-eks-abc"}, (1, 31)),
        ({"major": "", "minor": "", "gitVersion": "master"}, None),
        ({}, None),
    ],
)
def test_server_version_is_read_in_every_form(answer: dict[str, str], version: tuple[int, int] | None) -> None:
    """B48: distributions add suffixes; what cannot be read is None."""
    assert read_version(answer) == version
