// sync.c: see sync.h. During a sync each parameter has a byte of flags. Commit swaps the two
// versions after the last thing that can fail.
//
// In place there is one allocation: begin takes it out of service and makes it the staged one; the
// rest of the code is shared. Until the first byte is written, abort can restore it.
#include "weights/sync.h"

#include <string.h>

#include "base/checked.h"
#include "base/hash.h"
#include "base/memory.h"
#include "clock.h"
#include "weights/check.h"
#include "weights/store.h"

enum { MAX_ENTRIES = 1000000 };
// Pushed in full; pushed in full as a tied lm_head; some of its staged values were written.
enum { SEEN = 1, SEEN_AS_HEAD = 2, DIRTY = 4 };

// Where a parameter's flags, digests and count are. A tied lm_head and the embedding are one
// matrix, so the lm_head uses those of the embedding; its own stay 0.
static int64_t matrix_of(const rm_store *store, int64_t index) {
  return index == store->tied_head ? store->tied_embed : index;
}

// The flag of a parameter that was pushed in full.
static uint8_t seen_flag(const rm_store *store, int64_t index) {
  return index == store->tied_head ? SEEN_AS_HEAD : SEEN;
}

static int was_pushed(const rm_store *store, int64_t index) {
  return store->flags[index] & (SEEN | SEEN_AS_HEAD);
}

// ------------------------------------------------------------------------------------------ begin
static rm_code check_version(const rm_store *store, int64_t *version, rm_error *err) {
  RM_FAIL_IF(*version == -1 && !rm_add_i64(store->last_version, 1, version), RM_E_VERSION,
             "version %ld is the last number there is", store->last_version);
  RM_FAIL_IF(*version < 0, RM_E_VERSION, "version %ld is negative", *version);
  RM_FAIL_IF(*version <= store->last_version, RM_E_VERSION,
             "version %ld does not exceed %ld, the last one", *version, store->last_version);
  return RM_OK;
}

// Sets `staged` to the allocation that pushes write: a new one, the one left by the last swap, or
// in place the serving one.
static rm_code take_staging(rm_store *store, rm_error *err) {
  if (store->options.in_place && store->serving.block) {
    rm_store_drop_block(store, &store->staged);
    rm_store_swap_blocks(store);
    store->version = -1;
    return RM_OK;
  }
  if (store->staged.block) return RM_OK;
  const rm_device *device = store->device;
  const rm_device_status status = device->poll(device->self);
  if (status == RM_DEVICE_FAULT) return rm_device_check(device, status, err);
  const size_t bytes = store->params->bytes, available = device->available(device->self);
  RM_FAIL_IF(bytes > available, RM_E_CAPACITY, "%s of the weights takes %s and %s are available%s",
             store->serving.block ? "a second copy" : "one copy", rm_say_bytes((double)bytes).text,
             rm_say_bytes((double)available).text,
             store->serving.block ? "; mode=\"inplace\" needs none" : "");
  void *block;
  RM_TRY(rm_device_alloc(store->device, bytes, "the weights", &block, err));
  store->staged.block = block;
  store->staged.number = ++store->n_blocks;
  return RM_OK;
}

// Parameters that a partial sync does not push keep their values: staging starts as a copy of the
// serving weights.
static void copy_serving(rm_store *store) {
  const rm_device *device = store->device;
  if (device->on_host)
    rm_copy_block(store->staged.block, store->serving.block, store->params->bytes, &store->ctx);
  else rm_device_copy(device, store->staged.block, store->serving.block, store->params->bytes);
  memcpy(store->staged.sums, store->serving.sums,
         2 * (size_t)store->params->n * sizeof *store->serving.sums);
  memcpy(store->staged.counts, store->serving.counts,
         (size_t)store->params->n * sizeof *store->serving.counts);
}

rm_code rm_sync_begin(rm_store *store, const rm_sync_options *options, rm_error *err) {
  int64_t version = options->version;
  RM_TRY(check_version(store, &version, err));
  rm_sync_abort(store);
  rm_store_free_offloaded(store);
  store->began = rm_now();
  store->options = *options;
  store->options.version = version;
  store->version_before = store->version;
  store->has_base = options->allow_partial && store->serving.block != NULL;
  RM_TRY(take_staging(store, err));
  if (store->has_base && store->serving.block) copy_serving(store);
  memset(store->flags, 0, (size_t)store->params->n);
  store->report = (rm_sync_report){.version = version};
  store->n_entries = 0;
  store->open = 1;
  return RM_OK;
}

// ------------------------------------------------------------------------------------------ check
static rm_code check_new(const rm_store *store, const rm_entry *entry, rm_error *err) {
  for (int64_t i = 0; i < entry->target.n_pieces; i++) {
    const int64_t index = entry->target.pieces[i].param;
    if (!(store->flags[matrix_of(store, index)] & seen_flag(store, index))) continue;
    const rm_param_text earlier = rm_param_name(store->params, &store->params->list[index]);
    RM_FAIL_IF(strcmp(entry->name, earlier.text) == 0, RM_E_DUPLICATE_KEY,
               "%s has come already in this sync", earlier.text);
    return rm_fail(err, RM_E_DUPLICATE_KEY, "%s: %s has come already in this sync", entry->name,
                   earlier.text);
  }
  return RM_OK;
}

// Checks that the tensor is on the device that it names: reading a wrong address would end the
// device's context.
static rm_code check_place(const rm_store *store, const rm_tensor *tensor, const char *name,
                           rm_error *err) {
  const rm_device *device = store->device;
  const size_t each = rm_src_bytes(tensor->dtype);
  if (!tensor->on_device) return RM_OK;
  RM_FAIL_IF(device->on_host, RM_E_UNSUPPORTED_TENSOR,
             "%s: expected a tensor on the CPU, got one on cuda:%d", name, tensor->ordinal);
  RM_FAIL_IF(!tensor->data || device->ordinal_of(device->self, tensor->data) != tensor->ordinal,
             RM_E_UNSUPPORTED_TENSOR, "%s: the tensor's address %p is not in the memory of cuda:%d",
             name, tensor->data, tensor->ordinal);
  RM_FAIL_IF((uintptr_t)tensor->data % each, RM_E_LAYOUT,
             "%s: the tensor's address %p is not a multiple of the %zu bytes of an element", name,
             tensor->data, each);
  return RM_OK;
}

static rm_code check_open(const rm_store *store, rm_error *err) {
  return store->open ? RM_OK : rm_fail(err, RM_E_STATE, "push: expected an open sync, got none");
}

rm_code rm_sync_check(const rm_store *store, const rm_entry *entry, const rm_tensor *tensor,
                      rm_error *err) {
  RM_TRY(check_open(store, err));
  if (!entry->target.n_pieces) return RM_OK;
  RM_TRY(check_new(store, entry, err));
  RM_TRY(check_place(store, tensor, entry->name, err));
  return rm_tensor_check(store->params, &entry->target, tensor, store->options.cast, entry->name,
                         err);
}

// ------------------------------------------------------------------------------------------- push
// Digest of a parameter's Hugging Face name and values.
static uint64_t named_digest(const rm_params *params, const rm_param *param, uint64_t values) {
  const rm_param_text name = rm_param_name(params, param);
  const uint64_t hash = rm_hash_bytes(RM_HASH_SEED, name.text, strlen(name.text));
  return rm_hash_finish(hash ^ rm_hash_finish(values + RM_HASH_STEP));
}

// Returns the other parameter of a tied pair if it was pushed: this one must be equal to it. Else
// returns −1.
static int64_t tied_twin(const rm_store *store, int64_t index) {
  const int64_t twin = index == store->tied_head    ? store->tied_embed
                       : index == store->tied_embed ? store->tied_head
                                                    : -1;
  return twin >= 0 && (store->flags[store->tied_embed] & seen_flag(store, twin)) ? twin : -1;
}

// Returns the row of the tensor that contains this row of a piece's parameter.
static int64_t source_row(const rm_param_rows *piece, int64_t row) {
  const int64_t half = piece->turned / 2, at = rm_place_in_head(piece, row);
  if (piece->stride)
    return row % piece->head_dim +
           (piece->transposed ? 0 : piece->row0 + row / piece->head_dim * piece->stride);
  return piece->row0 + (at >= 0 && at < 2 * half ? row - at + 2 * (at % half) + at / half : row);
}

// Returns the column of the tensor with the first column of this row.
static int64_t source_col(const rm_param_rows *piece, int64_t row) {
  return piece->stride && piece->transposed ? row / piece->head_dim * piece->stride : 0;
}

// Returns how many rows from this one on, at most n, are evenly spaced in the tensor.
static int64_t even_rows(const rm_param_rows *piece, int64_t row, int64_t n) {
  const int64_t half = piece->turned / 2, at = rm_place_in_head(piece, row);
  if (piece->stride) return rm_min64(n, piece->head_dim - row % piece->head_dim);
  if (!half) return n;
  return rm_min64(n, at < 0          ? -at
                     : at < 2 * half ? half - at % half
                                     : piece->head_dim - piece->unturned - at);
}

// Arguments that copy a run of a parameter's rows (of a vector's elements) which are evenly spaced
// in the tensor.
static rm_pack_args pack_args(const rm_store *store, const rm_param_rows *piece,
                              const rm_tensor *tensor, rm_range run) {
  const rm_param *param = &store->params->list[piece->param];
  const int is_vector = param->n_dims == 1, last = tensor->n_dims - 1,
            row_dim = piece->outer < 0 ? 0 : last - (!is_vector && !piece->transposed);
  const int64_t row_stride = tensor->strides[row_dim],
                col_stride = is_vector ? 0 : tensor->strides[last - piece->transposed];
  const int64_t row = source_row(piece, run.first), at = rm_place_in_head(piece, run.first),
                step = at >= 0 && at < piece->turned ? 2 : 1;
  const int64_t outer = piece->outer > 0 ? piece->outer * tensor->strides[0] : 0,
                start = outer + row * row_stride + source_col(piece, run.first) * col_stride,
                skipped = run.first - param->first;
  return (rm_pack_args){
      .src = (const char *)tensor->data + start * (int64_t)rm_src_bytes(tensor->dtype),
      .src_dtype = tensor->dtype,
      .rows = is_vector ? 1 : run.n,
      .cols = is_vector ? run.n : param->cols,
      .row_stride = is_vector ? 0 : step * row_stride,
      .col_stride = is_vector ? step * row_stride : col_stride,
      .dst = store->staged.block + param->offset +
             (is_vector ? (size_t)skipped * rm_dtype_bytes(param->dtype) : 0),
      .dst_dtype = param->dtype,
      .layout = param->layout,
      .dst_row0 = param->dst_row0 + (is_vector ? 0 : skipped),
      .dst_cols = is_vector ? run.n : param->cols,
      .index0 = run.first * (is_vector ? 1 : param->cols),
  };
}

// The index of a piece's element in the sender's tensor.
static rm_dims_text show_index(const rm_store *store, const rm_param_rows *piece,
                               const rm_tensor *tensor, int64_t element) {
  const rm_param *param = &store->params->list[piece->param];
  const int64_t of = param->n_dims == 1 ? element : element / param->cols,
                row = source_row(piece, of), col = source_col(piece, of) + element % param->cols;
  int64_t at[3] = {piece->outer};
  int n = tensor->n_dims > param->n_dims;
  if (piece->outer < 0) at[0] = row, at[1] = 0, at[2] = col;
  else if (param->n_dims == 1) at[n] = row;
  else at[n + piece->transposed] = row, at[n + !piece->transposed] = col;
  return rm_show_dims(at, tensor->n_dims);
}

static rm_code add_run(rm_store *store, const rm_param_rows *piece, const rm_entry *entry,
                       rm_range run, int64_t twin, int counted, rm_error *err) {
  for (int64_t done = 0, n; done < run.n; done += n) {
    const int64_t row = run.first + done;
    n = even_rows(piece, row, run.n - done);
    rm_copy_task task = {.args = pack_args(store, piece, &entry->tensor, (rm_range){row, n}),
                         .entry = entry,
                         .piece = *piece,
                         .twin = twin,
                         .counted = counted};
    task.ordinal = entry->tensor.on_device ? entry->tensor.ordinal : -1;
    task.args.compare = twin >= 0;
    RM_TRY(rm_copy_tasks_add(&store->tasks, &task, err));
  }
  return RM_OK;
}

static int is_same_view(const rm_tensor *a, const rm_tensor *b) {
  const size_t dims = (size_t)a->n_dims * sizeof *a->shape;
  return a->data == b->data && a->dtype == b->dtype && a->n_dims == b->n_dims &&
         a->on_device == b->on_device && a->ordinal == b->ordinal &&
         memcmp(a->shape, b->shape, dims) == 0 && memcmp(a->strides, b->strides, dims) == 0;
}

// Returns whether the tied twin of this parameter is copied from the same memory in this call. Then
// the memory is not read again to compare.
static int shares_copies(const rm_store *store, int64_t twin, const rm_entry *entry) {
  for (int64_t i = 0; i < store->tasks.n && twin >= 0; i++) {
    const rm_copy_task *task = &store->tasks.list[i];
    if (task->piece.param == twin && is_same_view(&task->entry->tensor, &entry->tensor)) return 1;
  }
  return 0;
}

// Adds the copies of this rank's shard of one parameter: the rows that another rank counts, then
// the rows that this rank counts.
static rm_code add_piece(rm_store *store, const rm_param_rows *piece, const rm_entry *entry,
                         rm_error *err) {
  const rm_params *params = store->params;
  const rm_param *param = &params->list[piece->param];
  const rm_dim rows = rm_kind_rows(params->spec, param->kind);
  const rm_range counted =
      param->held ? rm_placement_counted(params->spec, &params->placement, rows) : (rm_range){0, 0};
  const int64_t twin = tied_twin(store, piece->param), index = matrix_of(store, piece->param);
  const rm_range others = {param->first, param->held - counted.n};
  if (shares_copies(store, twin, entry)) return RM_OK;
  if (twin < 0) {
    store->flags[index] |= DIRTY;
    store->staged.sums[index] = store->staged.sums[params->n + index] = 0;
    store->staged.counts[index] = 1;
  }
  RM_TRY(add_run(store, piece, entry, others, twin, 0, err));
  return add_run(store, piece, entry, (rm_range){others.first + others.n, counted.n}, twin, 1, err);
}

// Returns the first error found in the copies; otherwise adds their digests and bytes.
static rm_code check_tasks(rm_store *store, rm_error *err) {
  const rm_copy_tasks *tasks = &store->tasks;
  for (int64_t i = 0; i < tasks->n && !store->options.allow_nonfinite; i++) {
    const rm_copy_task *task = &tasks->list[i];
    RM_FAIL_IF(task->args.nonfinite_index >= 0, RM_E_NONFINITE,
               "%s: element %s is not finite as %s", task->entry->name,
               show_index(store, &task->piece, &task->entry->tensor,
                          task->args.index0 + task->args.nonfinite_index)
                   .text,
               rm_dtype_name(task->args.dst_dtype));
  }
  for (int64_t i = 0; i < tasks->n; i++) {
    const rm_copy_task *task = &tasks->list[i];
    RM_FAIL_IF(task->args.diff_index >= 0, RM_E_TIED_WEIGHT,
               "%s differs from %s at element %s, and tie_word_embeddings is set",
               task->entry->name,
               rm_param_name(store->params, &store->params->list[task->twin]).text,
               show_index(store, &task->piece, &task->entry->tensor,
                          task->args.index0 + task->args.diff_index)
                   .text);
  }
  for (int64_t i = 0; i < tasks->n; i++) {
    const rm_copy_task *task = &tasks->list[i];
    store->report.bytes +=
        (uint64_t)(task->args.rows * task->args.cols) * rm_src_bytes(task->args.src_dtype);
    const int64_t index = matrix_of(store, task->piece.param);
    if (task->twin >= 0) continue; // the values that it was compared with have this digest
    if (task->counted) store->staged.sums[index] += task->args.digest;
    store->staged.sums[store->params->n + index] += task->args.digest;
  }
  return RM_OK;
}

// Copies the next tasks, and checks the values after the last of them.
static rm_code run_tasks(rm_store *store, int64_t most, rm_error *err) {
  rm_copy_tasks *tasks = &store->tasks;
  const double start = rm_now();
  rm_code code = rm_copy_tasks_run(tasks, most, &store->staging, &store->ctx, err);
  if (!code && tasks->done == tasks->n) {
    code = check_tasks(store, err);
    tasks->n = tasks->done = 0;
  }
  store->report.copy_seconds += rm_now() - start;
  return code;
}

// Counts an entry as pushed (change 1), or takes that back (−1).
static void count_entry(rm_store *store, const rm_target *target, int change) {
  rm_sync_report *report = &store->report;
  for (int64_t i = 0; i < target->n_pieces; i++) // the flag is clear, or set
    store->flags[matrix_of(store, target->pieces[i].param)] ^=
        seen_flag(store, target->pieces[i].param);
  report->n_parameters += change * target->n_pieces;
  *(target->n_pieces ? &report->n_tensors : &report->n_skipped) += change;
}

// Adds the copies of an entry.
static rm_code take_entry(rm_store *store, const rm_entry *entry, rm_error *err) {
  const rm_target *target = &entry->target;
  int compares = 0;
  RM_FAIL_IF(store->n_entries >= MAX_ENTRIES, RM_E_LIMIT, "a sync of more than %d tensors",
             MAX_ENTRIES);
  store->n_entries++;
  RM_TRY(check_new(store, entry, err)); // it may come twice in one push
  for (int64_t i = 0; i < target->n_pieces; i++) {
    const int64_t twin = tied_twin(store, target->pieces[i].param);
    compares |= twin >= 0 && !shares_copies(store, twin, entry);
  }
  // The values to compare with must be copied first.
  if (compares) RM_TRY(run_tasks(store, INT64_MAX, err));
  for (int64_t i = 0; i < target->n_pieces; i++)
    RM_TRY(add_piece(store, &target->pieces[i], entry, err));
  count_entry(store, target, 1);
  return RM_OK;
}

rm_code rm_sync_push(rm_store *store, const rm_entry *const *entries, int64_t n, rm_error *err) {
  rm_code code = RM_OK;
  RM_TRY(check_open(store, err));
  if (store->tasks.n) rm_sync_undo(store); // the caller was interrupted
  store->pushed = entries;
  store->n_pushed = 0;
  store->read_before = store->report.bytes;
  while (store->n_pushed < n && !(code = take_entry(store, entries[store->n_pushed], err)))
    store->n_pushed++;
  if (code) rm_sync_undo(store);
  return code;
}

rm_code rm_sync_copy(rm_store *store, int64_t most, rm_error *err) {
  RM_TRY(check_open(store, err));
  const rm_code code = run_tasks(store, most, err);
  if (code) rm_sync_undo(store);
  return code;
}

void rm_sync_undo(rm_store *store) {
  for (int64_t e = 0; e < store->n_pushed && store->open; e++)
    count_entry(store, &store->pushed[e]->target, -1);
  if (store->n_pushed) store->report.bytes = store->read_before;
  store->tasks.n = store->tasks.done = store->n_pushed = 0;
}

// ----------------------------------------------------------------------------------------- commit
// Whether a parameter that was not pushed keeps its value: the sync began with a value, and it was
// not overwritten.
static int keeps_value(const rm_store *store, int64_t index) {
  return store->has_base && !(store->flags[index] & DIRTY);
}

// Whether a parameter is missing. An optional one is missing if its push failed half way.
static int is_absent(const rm_store *store, int64_t index) {
  const int wanted = store->params->list[index].required || (store->flags[index] & DIRTY);
  return wanted && !was_pushed(store, index) && !keeps_value(store, index);
}

static rm_code check_complete(const rm_store *store, rm_error *err) {
  int64_t n = 0;
  for (int64_t i = 0; i < store->params->n; i++) n += is_absent(store, i);
  if (!n) return RM_OK;
  rm_fail(err, RM_E_INCOMPLETE_SYNC, "version %ld lacks %ld of %ld parameters",
          store->options.version, n, store->params->n);
  const char *before = ": ";
  int only_biases = 1;
  for (int64_t i = 0; i < store->params->n; i++) {
    if (!is_absent(store, i)) continue;
    rm_error_append(err, "%s%s", before,
                    rm_param_name(store->params, &store->params->list[i]).text);
    before = ", ";
    only_biases &= store->params->list[i].kind == RM_P_ROUTER_BIAS;
  }
  if (only_biases)
    rm_error_append(
        err,
        "; it is a buffer, which parameters() and torchtitan's to_hf leave out: push the module's "
        "own state_dict()");
  return RM_E_INCOMPLETE_SYNC;
}

// Fails if the last version had a router bias that this one lacks: most likely a mistake. A router
// bias that was never pushed is zeros.
static rm_code check_biases(const rm_store *store, rm_error *err) {
  if (store->options.allow_bias_removal) return RM_OK;
  for (int64_t i = 0; i < store->params->n; i++) {
    const rm_param *param = &store->params->list[i];
    if (param->kind != RM_P_ROUTER_BIAS || (store->flags[i] & SEEN) || keeps_value(store, i) ||
        !store->has_bias[param->layer])
      continue;
    return rm_fail(
        err, RM_E_MISSING_KEY,
        "%s: version %ld had this router bias and version %ld has none (allow_bias_removal=True "
        "makes it zeros)",
        rm_param_name(store->params, param).text, store->last_version, store->options.version);
  }
  return RM_OK;
}

static void settle_biases(rm_store *store) {
  for (int64_t i = 0; i < store->params->n; i++) {
    const rm_param *param = &store->params->list[i];
    if (param->kind != RM_P_ROUTER_BIAS) continue;
    const int has =
        (store->flags[i] & SEEN) || (keeps_value(store, i) && store->has_bias[param->layer]);
    store->has_bias[param->layer] = (uint8_t)has;
    if (has) continue;
    rm_device_zero(store->device, store->staged.block + param->offset,
                   (size_t)param->cols * rm_dtype_bytes(param->dtype));
    store->staged.counts[i] = 0;
  }
}

rm_code rm_sync_prepare(rm_store *store, rm_error *err) {
  if (store->tasks.n) rm_sync_undo(store);
  RM_TRY(check_complete(store, err));
  RM_TRY(check_biases(store, err));
  const int64_t n = store->params->n;
  for (int64_t i = 0; i < n; i++) // clear the sums of an earlier sync
    if (!was_pushed(store, i) && !keeps_value(store, i))
      store->staged.sums[i] = store->staged.sums[n + i] = 0;
  return RM_OK;
}

void rm_sync_swap(rm_store *store, const uint64_t *sums) {
  settle_biases(store);
  store->staged.digest = 0;
  for (int64_t i = 0; i < store->params->n; i++)
    if (store->staged.counts[i])
      store->staged.digest += named_digest(store->params, &store->params->list[i], sums[i]);
  rm_store_swap_blocks(store);
  store->version = store->last_version = store->options.version;
  store->open = 0;
  store->report.digest = store->serving.digest;
  store->report.seconds = rm_now() - store->began;
}

static int anything_written(const rm_store *store) {
  for (int64_t i = 0; i < store->params->n; i++)
    if (store->flags[i] & DIRTY) return 1;
  return 0;
}

void rm_sync_abort(rm_store *store) {
  if (!store->open) return;
  store->open = 0;
  store->tasks.n = store->tasks.done = store->n_pushed = 0;
  // In place with nothing written yet: the allocation still holds the old version.
  if (store->options.in_place && store->version_before >= 0 && store->version < 0 &&
      !anything_written(store)) {
    rm_store_swap_blocks(store);
    store->version = store->version_before;
  }
}
