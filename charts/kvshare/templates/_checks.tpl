{{/*
What values.schema.json cannot say well: values that contradict each other. All mistakes are named at once, each with
what was given, what was expected, and what to do.
*/}}
{{- define "kvshare.checks" -}}
{{- $mistakes := list -}}
{{- $certificates := .Values.certificates -}}
{{- if eq $certificates.mode "Secret" -}}
  {{- if not $certificates.secretName -}}
    {{- $mistakes = append $mistakes "certificates.secretName: nothing given, the name of a Secret with tls.crt and tls.key expected with certificates.mode Secret: name it, or use another mode" -}}
  {{- end -}}
  {{- if not (contains "-----BEGIN CERTIFICATE-----" $certificates.caBundle) -}}
    {{- $mistakes = append $mistakes (printf "certificates.caBundle: %s given, CA certificates as PEM expected with certificates.mode Secret: use --set-file certificates.caBundle=ca.crt" (ternary "no certificate" "nothing" (ne $certificates.caBundle ""))) -}}
  {{- end -}}
  {{- if contains "PRIVATE KEY-----" $certificates.caBundle -}}
    {{- $mistakes = append $mistakes "certificates.caBundle: a private key given, certificates only expected: take the key out, everybody can read this value" -}}
  {{- end -}}
{{- else if $certificates.caBundle -}}
  {{- $mistakes = append $mistakes (printf "certificates.caBundle: a value given, nothing expected with certificates.mode %s, which brings its own CA: remove it, or use mode Secret" $certificates.mode) -}}
{{- end -}}
{{- if eq $certificates.mode "CertManager" -}}
  {{- $duration := trimSuffix "h" $certificates.certManager.duration | int -}}
  {{- $before := trimSuffix "h" $certificates.certManager.renewBefore | int -}}
  {{- if ge $before $duration -}}
    {{- $mistakes = append $mistakes (printf "certificates.certManager.renewBefore: %dh given, less than certificates.certManager.duration (%dh) expected: shorten it" $before $duration) -}}
  {{- end -}}
{{- else if $certificates.certManager.issuerRef -}}
  {{- $mistakes = append $mistakes (printf "certificates.certManager.issuerRef: an issuer given, nothing expected with certificates.mode %s: remove it, or use mode CertManager" $certificates.mode) -}}
{{- end -}}
{{- $unseen := concat (list "kube-system" .Release.Namespace) .Values.webhook.excludedNamespaces -}}
{{- range .Values.watchNamespaces -}}
  {{- if has . $unseen -}}
    {{- $mistakes = append $mistakes (printf "watchNamespaces: %s given, a namespace other than kube-system, the release's own and webhook.excludedNamespaces expected: pods there are never looked at, so take it out" .) -}}
  {{- end -}}
{{- end -}}
{{- $where := .Values.helmTest.namespace -}}
{{- if and .Values.helmTest.enabled $where -}}
  {{- if has $where $unseen -}}
    {{- $mistakes = append $mistakes (printf "helmTest.namespace: %s given, a namespace whose pods the webhook looks at expected: name another one" $where) -}}
  {{- else if and .Values.watchNamespaces (not (has $where .Values.watchNamespaces)) -}}
    {{- $mistakes = append $mistakes (printf "helmTest.namespace: %s given, one of watchNamespaces (%s) expected: name one of them, or none" $where (join ", " .Values.watchNamespaces)) -}}
  {{- end -}}
{{- end -}}
{{- if $mistakes -}}
{{- fail (printf "%d value(s) cannot be used\n  * %s" (len $mistakes) (join "\n  * " $mistakes)) -}}
{{- end -}}
{{- end -}}

{{/*
Every value by name. `helm upgrade --reuse-values` keeps the values of an older chart, without what is new in this one;
templates would end with an error about nil, so what is missing is said first. Whether this list is whole is tested.
*/}}
{{- define "kvshare.valueNames" -}}
image.repository image.tag image.pullPolicy imagePullSecrets watchNamespaces connector.image.repository
connector.image.tag connector.image.pullPolicy connector.pullSecrets logLevel controller.fullPassSeconds
controller.sweepSeconds controller.resources controller.priorityClassName controller.nodeSelector
controller.tolerations controller.affinity webhook.replicas webhook.failurePolicy webhook.timeoutSeconds
webhook.drainSeconds webhook.knownImages webhook.excludedNamespaces webhook.resources webhook.priorityClassName
webhook.nodeSelector webhook.tolerations webhook.affinity webhook.topologySpreadConstraints managedStore.enabled
managedStore.image managedStore.pullPolicy managedStore.pullSecrets managedStore.runAsUser certificates.mode
certificates.secretName certificates.caBundle certificates.certManager.issuerRef certificates.certManager.duration
certificates.certManager.renewBefore crds.enabled crds.keep podDisruptionBudget.enabled networkPolicies.enabled
networkPolicies.metricsFrom monitoring.dashboard.enabled monitoring.dashboard.namespace monitoring.dashboard.labels
monitoring.dashboard.annotations monitoring.alerts.enabled monitoring.alerts.labels monitoring.podMonitor.enabled
monitoring.podMonitor.labels monitoring.serviceMonitor.enabled monitoring.serviceMonitor.labels
monitoring.memberMonitor.enabled monitoring.memberMonitor.port monitoring.memberMonitor.labels helmTest.enabled
helmTest.namespace
{{- end -}}

{{- define "kvshare.complete" -}}
{{- $missing := list -}}
{{- range $name := splitList " " (include "kvshare.valueNames" . | replace "\n" " ") -}}
  {{- $here := $.Values -}}
  {{- $present := true -}}
  {{- range $key := splitList "." $name -}}
    {{- if and $present (kindIs "map" $here) (hasKey $here $key) -}}
      {{- $here = get $here $key -}}
    {{- else -}}
      {{- $present = false -}}
    {{- end -}}
  {{- end -}}
  {{- if not $present -}}
    {{- $missing = append $missing $name -}}
  {{- end -}}
{{- end -}}
{{- if $missing -}}
{{- fail (printf "%d value(s) of this chart are missing (%s): values of an older chart given, as helm upgrade --reuse-values does, all values expected: use --reset-then-reuse-values, or give your own values with -f" (len $missing) (join ", " $missing)) -}}
{{- end -}}
{{- end -}}
