"""Series under which each alert of the chart must fire, and a healthy fleet under which none may.

Written in promtool's notation: `0+5x240` starts at 0 and grows by 5 in each of 240 minutes, `_x20` is nothing for
20 minutes.
"""

from dataclasses import dataclass

MODEL = 'namespace="ns",pod="a",model_name="m",engine="0"'
SHARED, IN = 'verdict="shared",fingerprint', "exported_namespace="
FOUR_HOURS = "x240"
REVIEWS = 'kvshare_operator_reviews_total{namespace="sys",pod="w-1"'
RECONCILES = 'kvshare_operator_reconciles_total{namespace="sys",pod="k-controller-1",result="fault"}'


@dataclass(frozen=True)
class Case:
    """One alert and what makes it fire.

    Attributes:
        alert: its name.
        series: series with their values, minute by minute.
        at: minute at which it fires.
        quiet: minute at which it does not fire yet; None when the series begin with the fault.
        labels: labels that tell the reader where to look.
        words: something of its summary.
    """

    alert: str
    series: dict[str, str]
    at: int
    quiet: int | None
    labels: dict[str, str]
    words: str


HEALTHY = {
    'kvshare_operator_members{namespace="ns",pool="p",verdict="shared"}': f"2{FOUR_HOURS}",
    'kvshare_operator_members{namespace="ns",pool="p",verdict="isolated"}': f"0{FOUR_HOURS}",
    'kvshare_operator_pool_condition{namespace="ns",pool="p",condition="Ready"}': f"1{FOUR_HOURS}",
    'kvshare_operator_pool_condition{namespace="ns",pool="p",condition="MembersConsistent"}': f"0{FOUR_HOURS}",
    f'kvshare_member_info{{{MODEL},verdict="shared",fingerprint="f"}}': f"1{FOUR_HOURS}",
    f'kvshare_member_info{{{MODEL.replace(":a", ":b")},verdict="shared",fingerprint="f",tp="2"}}': f"1{FOUR_HOURS}",
    f"kvshare_hit_tokens_total{{{MODEL}}}": f"0+900{FOUR_HOURS}",
    f"kvshare_asked_tokens_total{{{MODEL}}}": f"0+9000{FOUR_HOURS}",
    f"kvshare_saved_objects_total{{{MODEL}}}": f"0+60{FOUR_HOURS}",
    f"kvshare_lookups_skipped_total{{{MODEL}}}": f"0{FOUR_HOURS}",
    f"kvshare_lookup_timeouts_total{{{MODEL}}}": f"0{FOUR_HOURS}",
    f"kvshare_dropped_save_blocks_total{{{MODEL}}}": f"0{FOUR_HOURS}",
    f'kvshare_failed_keys_total{{{MODEL},operation="get",code="OBJECT_NOT_FOUND"}}': f"0+200{FOUR_HOURS}",
    f'{REVIEWS},decision="injected",reason="Injected"}}': f"0+9{FOUR_HOURS}",
    f'{REVIEWS},decision="error",reason="InternalError"}}': f"0{FOUR_HOURS}",
    RECONCILES: f"0{FOUR_HOURS}",
    'kvshare_operator_status_writes_total{namespace="sys",pod="k-controller-1"}': f"3{FOUR_HOURS}",
    'kvshare_operator_certificate_expires_timestamp_seconds{namespace="sys",pod="w-1"}': f"7776000{FOUR_HOURS}",
}
"""A fleet that shares: some keys are always missing, and the certificate lasts 90 days."""

CASES = (
    Case(
        "KVSharePoolNotReady",
        {'kvshare_operator_pool_condition{namespace="ns",pool="p",condition="Ready"}': f"1x30 0{FOUR_HOURS}"},
        60, 30, {"namespace": "ns", "pool": "p"}, "Pool p cannot be used",
    ),
    Case(
        "KVShareMembersDoNotShare",
        {'kvshare_operator_members{namespace="ns",pool="p",verdict="isolated"}': f"0x30 1{FOUR_HOURS}"},
        60, 30, {"namespace": "ns", "pool": "p", "verdict": "isolated"}, "1 member(s) of pool p are isolated",
    ),
    Case(
        "KVShareFingerprintSplit",
        {
            f'kvshare_member_info{{{MODEL},{SHARED}="f",{IN}"kvs1/p-a/g1/f-f"}}': f"1{FOUR_HOURS}",
            f'kvshare_member_info{{{MODEL},{SHARED}="g",{IN}"kvs1/p-a/g1/f-g"}}': f"0x30 1{FOUR_HOURS}",
            # Another pool, and the generation before, have fingerprints of their own.
            f'kvshare_member_info{{{MODEL},{SHARED}="h",{IN}"kvs1/p-b/g1/f-h"}}': f"1{FOUR_HOURS}",
            f'kvshare_member_info{{{MODEL},{SHARED}="i",{IN}"kvs1/p-b/g2/f-i"}}': f"1{FOUR_HOURS}",
        },
        90, 30, {"namespace": "ns", "model_name": "m", "pool_prefix": "kvs1/p-a/g1"}, "keep 2 fingerprints",
    ),
    Case(
        "KVShareNoHits",
        {
            f"kvshare_hit_tokens_total{{{MODEL}}}": f"0{FOUR_HOURS}",
            f"kvshare_asked_tokens_total{{{MODEL}}}": f"0+9000{FOUR_HOURS}",
            f"kvshare_saved_objects_total{{{MODEL}}}": f"0+60{FOUR_HOURS}",
        },
        120, 30, {"namespace": "ns", "model_name": "m"}, "store blocks and load none",
    ),
    Case(
        "KVShareStoreAway",
        {f"kvshare_lookups_skipped_total{{{MODEL}}}": f"0x30 0+6{FOUR_HOURS}"},
        60, 30, {"namespace": "ns", "pod": "a"}, "away or hangs for a",
    ),
    Case(
        "KVShareStoreAway",
        {f'kvshare_failed_keys_total{{{MODEL},operation="put",code="RPC_FAIL"}}': f"_x30 1+60{FOUR_HOURS}"},
        60, 30, {"namespace": "ns", "pod": "a"}, "away or hangs for a",
    ),
    Case(
        "KVShareTransfersFail",
        {f'kvshare_failed_keys_total{{{MODEL},operation="get",code="TRANSFER_FAIL"}}': f"_x30 1+90{FOUR_HOURS}"},
        90, 30, {"namespace": "ns", "operation": "get", "code": "TRANSFER_FAIL"}, "1.5 keys a second",
    ),
    Case(
        "KVShareLookupsTooSlow",
        {f"kvshare_lookup_timeouts_total{{{MODEL}}}": f"0x30 0+2{FOUR_HOURS}"},
        60, 30, {"namespace": "ns", "pod": "a"}, "longer than their timeout",
    ),
    Case(
        "KVShareSavesDropped",
        {f"kvshare_dropped_save_blocks_total{{{MODEL}}}": f"0x30 0+9{FOUR_HOURS}"},
        90, 30, {"namespace": "ns", "pod": "a"}, "computes faster than it can store",
    ),
    # The first fault of a process brings its series: it must not go unseen because there was nothing before it.
    Case(
        "KVShareOperatorFaults",
        {f'{REVIEWS},decision="error",reason="InternalError"}}': f"_x30 1{FOUR_HOURS}"},
        33, 29, {"namespace": "sys", "pod": "w-1"}, "a fault of its own",
    ),
    Case(
        "KVShareOperatorFaults",
        {RECONCILES: f"_x30 1{FOUR_HOURS}"},
        33, 29, {"namespace": "sys", "pod": "k-controller-1"}, "a fault of its own",
    ),
    Case(
        "KVShareOperatorAway",
        {'kvshare_operator_status_writes_total{namespace="sys",pod="k-controller-1"}': "3x30 _x210"},
        60, 30, {}, "No KVShare controller",
    ),
    Case(
        "KVShareCertificateEnds",
        {'kvshare_operator_certificate_expires_timestamp_seconds{namespace="sys",pod="w-1"}': f"864000{FOUR_HOURS}"},
        90, None, {}, "certificate ends in 9d",
    ),
)  # fmt: skip
