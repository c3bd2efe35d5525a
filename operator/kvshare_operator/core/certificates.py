"""When the webhook's certificates must be renewed, and the new ones.

Why this exists: the operator issues its own certificates. Rules and cryptography are pure functions of the
present pair and the time; reading and writing the Secret is the edge's work. The bundle holds the new CA
beside the old one, so that servers and clients that changed at different moments still trust each other.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_LIFETIME: Final = datetime.timedelta(days=3650)
CA_RENEW_BEFORE: Final = datetime.timedelta(days=365)
LEAF_LIFETIME: Final = datetime.timedelta(days=90)
LEAF_RENEW_BEFORE: Final = datetime.timedelta(days=30)
_CLOCK_SKEW: Final = datetime.timedelta(minutes=5)


@dataclasses.dataclass(frozen=True)
class Material:
    """What the Secret holds, all PEM.

    ``bundle`` are the CA certificates that clients must trust (newest first), ``ca_key`` signs new leaves.
    """

    bundle: str
    ca_key: str = dataclasses.field(repr=False)
    certificate: str
    key: str = dataclasses.field(repr=False)

    def to_data(self) -> dict[str, str]:
        """Return the Secret's keys."""
        return {
            "ca.crt": self.bundle,
            "ca.key": self.ca_key,
            "tls.crt": self.certificate,
            "tls.key": self.key,
        }


def read_material(data: Mapping[str, str]) -> Material | None:
    """Read the Secret's keys; None when one is missing."""
    try:
        return Material(data["ca.crt"], data["ca.key"], data["tls.crt"], data["tls.key"])
    except KeyError:
        return None


def renewed(present: Material | None, dns_names: Iterable[str], now: datetime.datetime) -> tuple[Material, str] | None:
    """Return (new material, why) when something must change, else None.

    Damaged material counts as none. A new CA keeps the old one in the bundle until that expires.
    """
    names = tuple(dns_names)
    try:
        authorities = _certificates(present.bundle) if present else []
    except ValueError:
        authorities = []
    valid = [one for one in authorities if one.not_valid_after_utc > now]
    if present is None or not valid:
        return _issue([], names, now), "there is no valid CA"
    try:
        ca_key = _load_key(present.ca_key)
        fitting = ca_key.public_key() == valid[0].public_key()
    except ValueError:
        return _issue([], names, now), "the CA's key cannot be read"
    if not fitting:
        return _issue([], names, now), "the CA's key does not belong to the CA"
    if valid[0].not_valid_after_utc - now < CA_RENEW_BEFORE:
        return _issue(valid, names, now), "the CA expires soon"
    why = _leaf_problem(present, valid[0], names, now)
    if why is None:
        return None
    certificate, key = _leaf(valid[0], ca_key, names, now)
    return Material("".join(_pem(one) for one in valid), present.ca_key, certificate, key), why


def expires(certificate: str) -> datetime.datetime:
    """Return when a PEM certificate ends. Raises ValueError for anything else."""
    return _certificates(certificate)[0].not_valid_after_utc


def _leaf_problem(
    present: Material, authority: x509.Certificate, names: tuple[str, ...], now: datetime.datetime
) -> str | None:
    try:
        leaf = _certificates(present.certificate)[0]
        key = _load_key(present.key)
        leaf.verify_directly_issued_by(authority)
        alternatives = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return "the certificate cannot be used with the CA"
    if key.public_key() != leaf.public_key():
        return "certificate and key do not belong together"
    if leaf.not_valid_after_utc - now < LEAF_RENEW_BEFORE:
        return "the certificate expires soon"
    if set(alternatives.get_values_for_type(x509.DNSName)) != set(names):
        return "the certificate is for other names"
    return None


def _issue(older: list[x509.Certificate], names: tuple[str, ...], now: datetime.datetime) -> Material:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "kvshare.dev"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"kvshare CA {now:%Y-%m-%d}"),
        ]
    )
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip
    authority = (
        _builder(subject, subject, key.public_key(), now, CA_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate, leaf_key = _leaf(authority, key, names, now)
    return Material("".join(map(_pem, [authority, *older])), _key_pem(key), certificate, leaf_key)


def _leaf(
    authority: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    names: tuple[str, ...],
    now: datetime.datetime,
) -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    certificate = (
        _builder(subject, authority.subject, key.public_key(), now, LEAF_LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return _pem(certificate), _key_pem(key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    lifetime: datetime.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
    )


def _certificates(pem: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem.encode())


def _load_key(pem: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("an elliptic-curve key is expected")
    return key


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
