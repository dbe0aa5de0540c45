// model.h: one forward pass over a batch of rows: token ids in, hidden states of the asked-for rows out. The model owns its
// activations and rope table, sized at creation; weights and KV are views given per call, so a swap of either costs nothing. All of
// these, and whatever a call here gives or takes without another word, are the device's: a call enqueues, and does not wait.
//
// On a mesh every rank of a tensor parallel group makes the same calls with the same batch and gets the same results, bit for bit
// those of one rank. Only moving activations between ranks can fail; the codes are comm.h's.
#pragma once

#include "base/team.h"
#include "device/devices.h"
#include "model/params.h"
#include "model/rank.h"

typedef struct rm_model rm_model;

typedef struct rm_model_options {
  rm_dtype dtype;
  int64_t max_rows;             // rows of one forward
  int64_t max_positions;        // longest context; also the length of the rope table
  int64_t max_out_rows;         // rows of logits worked on at a time
  int64_t page_size;
  int64_t static_rows;          // of a forward whose exchanges have sizes known before, at most; 0: none has (rm_model_is_static)
  const rm_rank *rank;          // view, with the comms for device memory; until destroy
  const char *cublas_library;   // of the products of params that are plain; NULL: params are packed. View during create
} rm_model_options;

// Views of the engine's; all arrays valid until the forward returns, and on a device until it was waited for. They are the host's, in
// the block of `paired`, whose owner has put them already; routed and row_flags are written on the device alone.
typedef struct rm_batch {
  const rm_paired *paired;
  int64_t n_rows, n_seqs, max_pages;
  int64_t most_rows;            // n_rows of the rank that has most, of those that exchange; not looked at where all have as many
  const int32_t *ids;           // [n_rows]
  const int32_t *positions;     // [n_rows]
  const int32_t *seq_of_row;    // [n_rows]
  const int64_t *slots;         // [n_rows]
  const int32_t *block_tables;  // [n_seqs][max_pages]
  int64_t n_out;
  const int32_t *out_rows;      // [n_out] rows whose hidden state is wanted, ascending
  int16_t *routed;              // [n_rows][n_moe_layers][top_k], out; NULL in a dense model
  uint8_t *row_flags;           // [n_rows], or-ed
} rm_batch;

rm_code rm_model_create(const rm_params *params, const rm_device *device, rm_team *team, const rm_model_options *options, rm_model **out,
                        rm_error *err);
void rm_model_destroy(rm_model *model);
// Bytes of KV for one page over all layers, on the rank of the tp group that has most, so that all have as many pages. A block of
// n_pages holds, layer after layer, the K pages and then the V pages.
size_t rm_model_page_bytes(const rm_model *model);
size_t rm_model_workspace_bytes(const rm_model *model);   // activations, rope table and the ops' scratch
void rm_model_zero_page(const rm_model *model, void *kv, int64_t n_pages, int32_t page);
void rm_model_copy_page(const rm_model *model, void *kv, int64_t n_pages, int32_t to, int32_t from);
// Computes the indices that the host gives to the ops of a forward (host_indices.c). Called before each forward and each replay, outside
// of a capture. It first waits until the last forward has read its indices. Of the batch it reads host arrays only.
rm_code rm_model_prepare(rm_model *model, const rm_batch *batch, rm_error *err);
// After rm_model_prepare of the same batch. hidden: T [n_out][hidden], carved in the model, valid until the next forward.
rm_code rm_model_forward(rm_model *model, const void *weights, void *kv, int64_t n_pages, const rm_batch *batch, const void **hidden,
                         rm_error *err);
// Whether a forward of so many rows (most_rows or n_rows) can be captured: it only enqueues, and enqueues the same for every batch with
// as many rows and wanted rows.
int rm_model_is_static(const rm_model *model, int64_t rows);
const rm_ctx *rm_model_ctx(const rm_model *model);   // the ctx of its ops, for lm_head and sample on the same thread

// From hidden states to logits and their statistics; as rm_lm_head_args, over the whole vocabulary. logits may be NULL, and so may
// target_logprobs and then targets and host_targets. With `own_rows` a rank of a tp group gets the logits of its share of the rows
// alone, which rm_model_own_rows names; the other rows of `logits` are undefined.
typedef struct rm_head {
  const void *hidden;           // T [rows][hidden]
  int64_t rows, ld_logits;
  int own_rows;
  float *logits, *stats, *target_logprobs;
  const int32_t *targets, *host_targets; // the same, the second the host's
  uint8_t *row_flags;
} rm_head;
rm_code rm_model_head(rm_model *model, const void *weights, const rm_head *head, rm_error *err);
// The run of n rows that rank r of the tp group has.
rm_range rm_model_own_rows(const rm_model *model, int64_t n, int r);
// What each rank has made of its rows, for all: rank r's counts[r] items of `bytes` each stand in their place of `items`, the host's.
rm_code rm_model_share(rm_model *model, void *items, const int64_t *counts, size_t bytes, rm_error *err);
