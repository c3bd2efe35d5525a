{{/* One name for everything of a release: `kvshare` for a release of that name. */}}
{{- define "kvshare.fullname" -}}
{{- if contains "kvshare" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-kvshare" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvshare.labels" -}}
app.kubernetes.io/name: kvshare
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvshare.selector" -}}
app.kubernetes.io/name: kvshare
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvshare.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{/* Where `helm test` would create its pod; nothing, when that is where pods are never looked at. */}}
{{- define "kvshare.testNamespace" -}}
{{- $where := .Values.helmTest.namespace | default (first (append .Values.watchNamespaces "default")) -}}
{{- if and .Values.helmTest.enabled (not (has $where (concat (list "kube-system" .Release.Namespace) .Values.webhook.excludedNamespaces))) -}}
{{- $where -}}
{{- end -}}
{{- end -}}

{{- define "kvshare.certificateSecret" -}}
{{- .Values.certificates.secretName | default (printf "%s-webhook-certificates" (include "kvshare.fullname" .)) -}}
{{- end -}}

{{/* What both processes are told. */}}
{{- define "kvshare.environment" -}}
- name: POD_ID
  valueFrom:
    fieldRef:
      apiVersion: v1
      fieldPath: metadata.name
- name: KVSHARE_NAMESPACE
  value: {{ .Release.Namespace | quote }}
- name: KVSHARE_SERVICE
  value: {{ include "kvshare.fullname" . }}-webhook
{{- with .Values.watchNamespaces }}
- name: KVSHARE_WATCH_NAMESPACES
  value: {{ join "," . | quote }}
{{- end }}
- name: KVSHARE_CONNECTOR_IMAGE
  value: {{ printf "%s:%s" .Values.connector.image.repository (.Values.connector.image.tag | default .Chart.AppVersion) }}
- name: KVSHARE_LOG_LEVEL
  value: {{ .Values.logLevel }}
{{- end -}}

{{- define "kvshare.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvshare.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
