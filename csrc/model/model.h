// model.h: one forward pass over a batch of rows: token ids in, hidden states of the requested rows
// out. The model owns its activations and rope table, sized at creation; weights and KV are views
// passed to each call. One thread at a time uses a model, after it has entered the device. A step
// calls rm_model_prepare, rm_model_forward, rm_model_head. Pointers are device memory unless stated
// otherwise, and calls only enqueue work.
//
// On a mesh every rank of a tensor parallel group makes the same calls with the same batch and gets
// the same results, bit-identical to those of one rank. Only exchanges between ranks can fail, with
// the codes of comm.h.
#pragma once

#include "base/team.h"
#include "device/devices.h"
#include "model/params.h"
#include "model/rank.h"
#include "profile.h"

typedef struct rm_model rm_model;

typedef struct rm_model_options {
  rm_dtype dtype;
  int64_t max_rows; // rows of one forward
  int64_t max_positions; // longest context; also the length of the rope table
  int64_t max_out_rows; // rows of logits computed at a time
  int64_t page_size;
  int64_t static_rows; // max rows of a forward with exchanges of fixed sizes; 0: none
  const rm_rank *rank; // view until destroy, with the comms for device memory
  rm_profile *profile; // view; NULL: none. The device has its op table
  const char *cublas_library; // view during create, for plain params; NULL: params are packed
} rm_model_options;

// The rows of one step. Arrays are views of host addresses in `mirrored`, whose owner has copied
// them to the device; they stay valid until the device has completed the forward. routed and
// row_flags are written on the device only.
typedef struct rm_batch {
  const rm_mirrored_buffer *mirrored;
  int64_t n_rows, n_seqs, max_pages; // n_seqs: as in rm_attention_args
  int64_t most_rows; // the largest n_rows of the ranks of an ep group; ignored without one
  const int32_t *ids; // [n_rows]
  const int32_t *positions; // [n_rows]
  const int32_t *seq_of_row; // [n_rows]
  const int64_t *slots; // [n_rows]
  // In models with states: the state that is loaded before the first row of a sequence, −1: zeros,
  // [max seq_of_row + 1]; the state to which a row is saved, −1: none, [n_rows].
  const int32_t *load_states, *save_states;
  const int32_t *block_tables; // [max seq_of_row + 1][max_pages]
  int64_t n_out;
  const int32_t *out_rows; // [n_out] rows whose hidden state is requested, ascending
  int16_t *routed; // [n_rows][n_moe_layers][top_k], out; NULL in a dense model
  uint8_t *row_flags; // [n_rows], out: ops set flags in it
} rm_batch;

// Views of what sequences keep between steps, in the device's memory, layer by layer: for a layer
// with KV pages, the parts of all pages (K, then V); for a layer with states, all states.
typedef struct rm_cache {
  void *pages;
  int64_t n_pages;
  void *states;
  int64_t n_states;
} rm_cache;

rm_code rm_model_create(const rm_params *params, const rm_device *device, rm_team *team,
                        const rm_model_options *options, rm_model **out, rm_error *err);
void rm_model_destroy(rm_model *model);
// Bytes of one KV page, and of the state of one sequence, over all layers, on the rank of the tp
// group whose page or state is largest, so that all ranks have the same number of them.
typedef struct rm_cache_bytes {
  size_t page, state; // state 0: all layers have only pages
} rm_cache_bytes;
rm_cache_bytes rm_model_cache_bytes(const rm_model *model);
// Bytes of activations, rope table and the ops' scratch.
size_t rm_model_workspace_bytes(const rm_model *model);
// Copies a page over another, or zeroes it (from −1).
void rm_model_write_page(const rm_model *model, const rm_cache *cache, int32_t to, int32_t from);
// Computes the ops' indices on the host (host_indices.c). Called before each forward and each
// replay, outside of a capture. First waits until the previous forward has read its indices. Reads
// only host arrays of the batch.
rm_code rm_model_prepare(rm_model *model, const rm_batch *batch, rm_error *err);
// Called after rm_model_prepare with the same batch. *hidden: T [n_out][hidden], a view of the
// model's memory until the next forward.
rm_code rm_model_forward(rm_model *model, const void *weights, const rm_cache *cache,
                         const rm_batch *batch, const void **hidden, rm_error *err);
// Whether a forward of this many rows (most_rows or n_rows) can be captured: it only enqueues work,
// and the same work for every batch with the same n_rows and n_out.
int rm_model_is_static(const rm_model *model, int64_t rows);
// The ctx of the model's ops, for other ops on the same thread.
const rm_ctx *rm_model_ctx(const rm_model *model);

// Arguments from hidden states to logits and their statistics (rm_lm_head_args), over the whole
// vocabulary. Optional: logits; target_logprobs with targets and host_targets. With `own_rows` a
// rank of a tp group gets the logits of its share of the rows only (rm_model_own_rows); other rows
// of `logits` are undefined.
typedef struct rm_head {
  const void *hidden; // T [rows][hidden]
  int64_t rows, ld_logits;
  int own_rows;
  float *logits, *stats, *target_logprobs;
  const int32_t *targets, *host_targets; // the same values on the device and on the host
  uint8_t *row_flags;
} rm_head;
rm_code rm_model_head(rm_model *model, const void *weights, const rm_head *head, rm_error *err);
// The share of rank r of the tp group in n rows.
rm_range rm_model_own_rows(const rm_model *model, int64_t n, int r);
