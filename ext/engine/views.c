// views.c: copies results into new arrays, since the engine's views are valid only until the next
// step.
#include "engine_object.h"

#include "attributes.h"
#include "weights/names.h"

static const char *const finish_names[] = {[RM_RUNNING] = NULL,
                                           [RM_FINISH_STOP] = "stop",
                                           [RM_FINISH_LENGTH] = "length",
                                           [RM_FINISH_ABORT] = "abort",
                                           [RM_FINISH_ERROR] = "error"};

static PyObject *error_object(const rm_sequence_group *group) {
  if (!group->error) return Py_NewRef(Py_None);
  RM_OWNED *type = rm_error_class(group->error);
  return type ? PyObject_CallFunction(type, "s", group->message) : NULL;
}

typedef struct record { // [n], or [n][top]
  const char *key;
  const void *data;
  int type, has_top, optional; // optional: None without data
} record;

static void put_records(PyObject **dict, const record *records, size_t n_records, int64_t n,
                        int64_t top) {
  const int64_t shape[2] = {n, top};
  for (size_t i = 0; *dict && i < n_records; i++) {
    const record *r = &records[i];
    const void *data = r->has_top && top <= 0 ? NULL : r->data;
    rm_dict_put(dict, r->key,
                data || !r->optional ? rm_array_new(r->type, 1 + r->has_top, shape, data)
                                     : Py_NewRef(Py_None));
  }
}

// Adds n rows of the routing, or None.
static void put_routed(rm_engine_object *self, PyObject **dict, const char *key, int has_routing,
                       const void *ids, int64_t n) {
  const int64_t shape[3] = {n, self->spec->n_moe_layers, self->spec->top_k};
  rm_dict_put(dict, key,
              has_routing ? rm_array_new(NPY_INT16, 3, shape, n ? ids : NULL) : Py_NewRef(Py_None));
}

static void put_prompt(rm_engine_object *self, PyObject **dict, const rm_sequence_group *group) {
  const record records[] = {
      {"prompt_logprobs", group->prompt_logprobs, NPY_FLOAT32, 0, 1},
      {"prompt_sampling_logprobs", group->prompt_sampling, NPY_FLOAT32, 0, 1},
      {"prompt_ranks", group->prompt_ranks, NPY_INT32, 0, 1},
      {"prompt_top_ids", group->prompt_top_ids, NPY_INT32, 1, 1},
      {"prompt_top_logprobs", group->prompt_top_logprobs, NPY_FLOAT32, 1, 1},
  };
  put_records(dict, records, RM_LENGTH(records), group->n_prompt - 1, group->prompt_top);
  // Only for finished requests: a stream would otherwise copy this largest record after each step.
  put_routed(self, dict, "prompt_routed", group->n_done == group->n && group->prompt_routed,
             group->prompt_routed, group->n_prompt);
}

RM_ENGINE_METHOD(request, argument) {
  uint64_t id;
  rm_error err = RM_ERROR_INIT;
  if (rm_engine_id(argument, &id)) return NULL;
  const rm_sequence_group *group =
      rm_find_sequence_group(rm_engine_scheduler(self->engine, id), id, &err);
  if (!group) return rm_raise(&err);
  const rm_request_times *times = &group->times;
  PyObject *dict = Py_BuildValue(
      "{sO sN sn sn si s(dddd)}", "finished", group->n_done == group->n ? Py_True : Py_False,
      "error", error_object(group), "num_cached_tokens", group->n_cached, "num_scored",
      group->n_scored, "n", (int)group->n, "times", times->queued, times->scheduled,
      times->first_token, times->last_token);
  put_prompt(self, &dict, group);
  return dict;
}

// args: (id, sample), or (id, sample, start).
static const rm_sequence *read_sample(rm_engine_object *self, PyObject *args, const char *format,
                                      long long *start) {
  unsigned long long id;
  int sample;
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTuple(args, format, &id, &sample, start)) return NULL;
  const rm_sequence *seq = rm_find_sample(rm_engine_scheduler(self->engine, id), id, sample, &err);
  if (!seq) rm_raise(&err);
  return seq;
}

RM_ENGINE_METHOD(sample, args) {
  const rm_sequence *seq = read_sample(self, args, "Ki:sample", NULL);
  if (!seq) return NULL;
  const int64_t n = seq->n_tokens;
  const record records[] = {
      {"token_ids", seq->ids + seq->group->n_prompt, NPY_INT32, 0, 0},
      {"logprobs", seq->logprobs, NPY_FLOAT32, 0, 0},
      {"sampling_logprobs", seq->sampling_logprobs, NPY_FLOAT32, 0, 0},
      {"versions", seq->versions, NPY_INT64, 0, 0},
      {"no_contract", seq->no_contract, NPY_UINT8, 0, 0},
      {"ranks", seq->ranks, NPY_INT32, 0, 1},
      {"top_ids", seq->top_ids, NPY_INT32, 1, 1},
      {"top_logprobs", seq->top_logprobs, NPY_FLOAT32, 1, 1},
      {"kept", seq->kept, NPY_INT32, 0, 1},
  };
  PyObject *dict = Py_BuildValue("{sz si}", "finish", finish_names[seq->finish], "stop_token",
                                 (int)seq->stop_token);
  put_records(&dict, records, RM_LENGTH(records), n, seq->group->top_logprobs);
  put_routed(self, &dict, "routed", self->spec->n_moe_layers && seq->finish != RM_RUNNING,
             seq->routed, n > 0 ? n - 1 : 0);
  return dict;
}

RM_ENGINE_METHOD(tokens, args) {
  long long start;
  const rm_sequence *seq = read_sample(self, args, "KiL:tokens", &start);
  if (!seq) return NULL;
  const int64_t from = rm_min64(rm_max64(start, 0), seq->n_tokens),
                shape[1] = {seq->n_tokens - from};
  return Py_BuildValue(
      "(zN)", finish_names[seq->finish],
      rm_array_new(NPY_INT32, 1, shape, shape[0] ? seq->ids + seq->group->n_prompt + from : NULL));
}

#define STAT(member) RM_MEMBER(rm_engine_stats, member)
#define STAT_AS(name, member) RM_MEMBER_AS(rm_engine_stats, name, member)
static const rm_attribute stats_fields[] = {
    STAT(version),
    STAT(waiting),
    STAT(running),
    STAT(steps),
    STAT(rows),
    STAT(generated_tokens),
    STAT(prompt_tokens),
    STAT(cached_tokens),
    STAT(preemptions),
    STAT_AS(graph_replays, replays),
    STAT(kv_pages),
    STAT(kv_pages_free),
    STAT(prefix_hits),
    STAT(prefix_misses),
    STAT(evictions),
    STAT(states),
    STAT(states_free),
    STAT(state_evictions),
    STAT(weight_bytes),
    STAT(kv_bytes),
    STAT(workspace_bytes),
    STAT_AS(threads, n_threads),
    STAT(asleep),
    STAT(device),
    STAT(isa),
    STAT(family),
    STAT(forward_seconds),
    STAT(schedule_seconds),
    STAT(commit_seconds),
    STAT(comm_bytes),
    STAT(comm_calls),
    STAT(comm_seconds),
};

RM_ENGINE_METHOD(stats, ) {
  rm_engine_stats stats;
  rm_engine_statistics(self->engine, &stats);
  return rm_attributes_dict(&stats, stats_fields, RM_LENGTH(stats_fields));
}

#define TIME(member) RM_MEMBER(rm_profile_entry, member)
static const rm_attribute profile_fields[] = {
    TIME(op),      TIME(n),      TIME(k),     TIME(calls),        TIME(rows),
    TIME(seconds), TIME(waited), TIME(flops), TIME(weight_bytes),
};

// Returns the times of rank 0 of this process since the last call.
RM_ENGINE_METHOD(profile, ) {
  rm_profile *profile = rm_engine_profile(self->engine);
  PyObject *list = PyList_New(0);
  for (int i = 0; list && profile && i < profile->n_entries; i++)
    rm_list_put(
        &list, rm_attributes_dict(&profile->entries[i], profile_fields, RM_LENGTH(profile_fields)));
  if (list && profile) rm_profile_reset(profile);
  return list;
}

RM_ENGINE_METHOD(manifest, ) {
  const rm_params *params = rm_engine_store(self->engine)->params;
  PyObject *list = PyList_New(0);
  for (const rm_param *p = params->list; list && p < params->list + params->n; p++) {
    const int64_t shape[] = {p->rows, p->cols};
    rm_list_put(&list, Py_BuildValue("(sNsO)", rm_param_name(params, p).text,
                                     rm_tuple_of(shape + 2 - p->n_dims, p->n_dims),
                                     p->dtype == RM_BF16 ? "bfloat16" : "float32",
                                     p->required ? Py_True : Py_False));
  }
  return list;
}
