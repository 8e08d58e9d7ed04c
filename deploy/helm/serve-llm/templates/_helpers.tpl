{{/* Which kind of workload one copy of the model is. */}}
{{- define "serve-llm.kind" -}}
{{- if eq (int .Values.parallel.nodes) 1 -}}Deployment{{- else -}}{{ .Values.parallel.nodesKind }}{{- end -}}
{{- end -}}

{{/* Labels of the pods, which Services and policies select. Alerts and dashboards select job="serve-llm" by `app`. */}}
{{- define "serve-llm.selector" -}}
app: serve-llm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The same of pods that only answer clients. */}}
{{- define "serve-llm.front-end-selector" -}}
app: serve-llm-front-end
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "serve-llm.labels" -}}
{{ include "serve-llm.selector" . }}
{{ include "serve-llm.common-labels" . }}
{{- end -}}

{{- define "serve-llm.front-end-labels" -}}
{{ include "serve-llm.front-end-selector" . }}
{{ include "serve-llm.common-labels" . }}
{{- end -}}

{{- define "serve-llm.common-labels" -}}
app.kubernetes.io/name: serve-llm
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Labels of the pods that serve HTTP: of several nodes only the first does. */}}
{{- define "serve-llm.frontend" -}}
{{ include "serve-llm.selector" . }}
{{- if eq (include "serve-llm.kind" .) "StatefulSet" }}
apps.kubernetes.io/pod-index: "0"
{{- else if eq (include "serve-llm.kind" .) "LeaderWorkerSet" }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end -}}

{{/* Options of serve-llm on the pod that serves HTTP. */}}
{{- define "serve-llm.args" -}}
- {{ .Values.model | quote }}
- --device={{ .Values.device }}
- --tensor-parallel-size={{ .Values.parallel.tensor }}
- --pipeline-parallel-size={{ .Values.parallel.pipeline }}
- --data-parallel-size={{ .Values.parallel.data }}
- --drain-timeout={{ .Values.drainSeconds }}
{{- if gt (int .Values.frontEnds) 1 }}
- --front-ends={{ .Values.frontEnds }}
{{- end }}
{{- if .Values.frontEndPods.replicas }}
- --front-end-addr=0.0.0.0:29700
{{- end }}
{{- with .Values.quantization }}
- --quantization={{ . }}
{{- end }}
{{- with .Values.maxModelLen }}
- --max-model-len={{ . }}
{{- end }}
{{- with .Values.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Resources of a container, with its GPUs and RDMA devices. */}}
{{- define "serve-llm.resources" -}}
{{- $devices := deepCopy .Values.rdma -}}
{{- if eq .Values.device "cuda" -}}
{{- $parallel := .Values.parallel -}}
{{- $ranks := mul $parallel.tensor $parallel.pipeline $parallel.data -}}
{{- if mod $ranks $parallel.nodes -}}
{{- fail (printf "parallel: %d ranks cannot be spread evenly over %d nodes" (int $ranks) (int $parallel.nodes)) -}}
{{- end -}}
{{- $_ := set $devices "nvidia.com/gpu" (div $ranks $parallel.nodes | toString) -}}
{{- end -}}
requests:
  {{- toYaml (merge (deepCopy (.Values.resources.requests | default dict)) $devices) | nindent 2 }}
limits:
  {{- toYaml (merge (deepCopy (.Values.resources.limits | default dict)) $devices) | nindent 2 }}
{{- end -}}

{{/* A pod's metadata and spec. Arguments: root; role: "single", the "frontend" or a "worker"
of a LeaderWorkerSet, or "any" pod of a StatefulSet, which differ by index only. */}}
{{- define "serve-llm.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "serve-llm.selector" $root | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "serve-llm.pod-security" $root | nindent 2 }}
  containers:
    - name: serve-llm
      image: "{{ $values.image.repository }}:{{ $values.image.tag }}"
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if ne .role "single" }}
      command: ["bash", "-ec"]
      args:
        - |
          {{- include "serve-llm.node" . | nindent 10 }}
        - serve-llm
        {{- include "serve-llm.args" $root | nindent 8 }}
      {{- else }}
      args:
        {{- include "serve-llm.args" $root | nindent 8 }}
      {{- end }}
      ports:
        - {name: http, containerPort: 8000}
        {{- if ne .role "single" }}
        - {name: nodes, containerPort: 29500}
        {{- end }}
        {{- if $values.frontEndPods.replicas }}
        - {name: front-ends, containerPort: 29700}
        {{- end }}
      env:
        - name: SERVE_LLM_API_KEY
          valueFrom: {secretKeyRef: {name: {{ $values.secret }}, key: api-key}}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ $values.secret }}, key: hf-token, optional: true}}
        {{- if or $values.frontEndPods.replicas (ne .role "single") }}
        - name: SERVE_LLM_CLUSTER_SECRET
          valueFrom: {secretKeyRef: {name: {{ $values.secret }}, key: cluster-secret}}
        {{- end }}
        {{- if ne .role "single" }}
        - name: SERVE_LLM_HOST_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if ne .role "worker" }}
      startupProbe:
        {{- include "serve-llm.probe" (dict "role" .role "path" "/ready") | nindent 8 }}
        periodSeconds: 5
        failureThreshold: {{ div $values.startSeconds 5 }}
      readinessProbe:
        {{- include "serve-llm.probe" (dict "role" .role "path" "/ready") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      livenessProbe:
        {{- include "serve-llm.probe" (dict "role" .role "path" "/health") | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- end }}
      lifecycle:
        preStop:
          exec: {command: ["sleep", "5"]} # until the Service sends no new requests here
      resources:
        {{- include "serve-llm.resources" $root | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]{{ if eq $values.device "cuda" }}, add: [IPC_LOCK]{{ end }}}
      volumeMounts:
        - {name: models, mountPath: /home/serve/.cache/huggingface}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    - name: models
      persistentVolumeClaim: {claimName: {{ include "serve-llm.claim" $root }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* What all pods have: rights, time to end, and secrets of the image. */}}
{{- define "serve-llm.pod-security" -}}
# 5 s for the sleep below, drainSeconds for open requests after SIGTERM, the rest to exit.
terminationGracePeriodSeconds: {{ add .Values.drainSeconds 30 }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "serve-llm.claim" -}}
{{ .Values.models.claim | default (printf "%s-models" .Release.Name) }}
{{- end -}}

{{/* A probe. Of a StatefulSet's pods only the first serves HTTP; the others are well while they run. */}}
{{- define "serve-llm.probe" -}}
{{- if eq .role "any" -}}
exec:
  command:
    - bash
    - -c
    - '[ "${HOSTNAME##*-}" != 0 ] || exec wget -q -O /dev/null -T 3 http://127.0.0.1:8000{{ .path }}'
{{- else -}}
httpGet: {path: {{ .path }}, port: http}
{{- end -}}
{{- end -}}

{{/* The command of one node of several. Its arguments are the options of node 0, after the name. */}}
{{- define "serve-llm.node" -}}
{{- $nodes := .root.Values.parallel.nodes -}}
{{- $name := .root.Release.Name -}}
{{- if eq .role "any" -}}
rank="${HOSTNAME##*-}"
master={{ $name }}-0.{{ $name }}-nodes
{{- else -}}
rank="$LWS_WORKER_INDEX"
master="$LWS_LEADER_ADDRESS"
{{- end }}
shared=(--nnodes {{ $nodes }} --node-rank "$rank" --master-addr "$master:29500")
[ "$rank" = 0 ] || exec serve-llm "${shared[@]}"
exec serve-llm "$@" "${shared[@]}"
{{- end -}}
