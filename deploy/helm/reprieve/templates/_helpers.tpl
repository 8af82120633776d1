{{/* The names are fixed: the operator, its webhook and its roles exist once in a cluster. */}}
{{- define "reprieve.name" -}}reprieve-operator{{- end }}

{{/* The Secret with the certificates that all replicas share. */}}
{{- define "reprieve.secret" -}}
{{- .Values.webhook.certSecret | default (printf "%s-certificates" (include "reprieve.name" .)) -}}
{{- end }}

{{- define "reprieve.selector" -}}
app.kubernetes.io/name: {{ include "reprieve.name" . }}
{{- end }}

{{- define "reprieve.labels" -}}
{{ include "reprieve.selector" . }}
app.kubernetes.io/part-of: reprieve
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "reprieve.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* YAML reads `off` as false. */}}
{{- define "reprieve.progress" -}}
{{- if kindIs "bool" .Values.progress.mode }}off{{ else }}{{ .Values.progress.mode }}{{ end }}
{{- end }}

{{/* What a namespace that enforces `restricted` asks of a pod, and of a container. The user is that of the image, or the
one that OpenShift chooses. */}}
{{- define "reprieve.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "reprieve.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Of what the uninstall needs, with the weight: what it needs first has a lower one. */}}
{{- define "reprieve.uninstallMetadata" -}}
name: reprieve-uninstall
labels:
  app.kubernetes.io/name: reprieve-uninstall
  app.kubernetes.io/part-of: reprieve
annotations:
  helm.sh/hook: post-delete
  helm.sh/hook-weight: {{ . | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
  helm.sh/hook-output-log-policy: hook-failed
{{- end }}
