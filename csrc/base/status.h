// status.h: error codes and messages. Every function that can fail returns an rm_code and fills an
// rm_error, which the caller owns, with one sentence: "name: expected X, got Y". The library does
// not print or exit.
#pragma once

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

typedef enum rm_code {
  RM_OK = 0,
  RM_E_CONFIG, // a model or engine setting breaks a rule
  RM_E_REQUEST, // a request is malformed; only that request is rejected
  RM_E_STATE, // the call does not fit the state (asleep, closed, a sync is open)
  RM_E_NOT_SYNCED, // no weights yet
  RM_E_VERSION, // a version that does not increase
  RM_E_MISSING_KEY,
  RM_E_UNEXPECTED_KEY,
  RM_E_DUPLICATE_KEY,
  RM_E_TIED_WEIGHT,
  RM_E_SHAPE,
  RM_E_DTYPE,
  RM_E_LAYOUT,
  RM_E_UNSUPPORTED_TENSOR,
  RM_E_NONFINITE,
  RM_E_LIMIT,
  RM_E_INCOMPLETE_SYNC,
  RM_E_CAPACITY, // the request or buffer can never fit
  RM_E_NUMERICS, // a row of logits, K or V is not finite
  RM_E_MEMORY, // an allocation failed
  RM_E_MESH_MISMATCH, // ranks with settings that differ
  RM_E_COLLECTIVE_MISMATCH,
  RM_E_COLLECTIVE_TIMEOUT,
  RM_E_RANK_LOST,
  RM_E_SYNC_ABORTED, // another rank, or the sender, aborted a sync
  RM_E_AUTH, // shared memory of another run: its nonce differs
  RM_E_DEVICE, // a GPU failed; its results and its context are gone
  RM_N_CODE
} rm_code;

typedef struct rm_error {
  rm_code code;
  char *message; // owned, up to 64 KiB; NULL: it could not be allocated
} rm_error;

#define RM_ERROR_INIT {RM_OK, 0}

// Makes the function return the code of a call that fails.
#define RM_TRY(call) \
  do { \
    const rm_code rm_failed = (call); \
    if (rm_failed) return rm_failed; \
  } while (0)

// Replaces code and message and returns code, so that a function can `return rm_fail(err, …)`. err
// may be NULL. Messages print an int64_t by %ld, since it is a long on 64-bit Linux.
rm_code rm_fail(rm_error *err, rm_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// Makes the function fail if the condition is true.
#define RM_FAIL_IF(condition, ...) \
  do { \
    if (condition) return rm_fail(err, __VA_ARGS__); \
  } while (0)
// Fails with RM_E_MEMORY: `bytes` for `what` could not be allocated. 0: some bytes.
rm_code rm_no_memory(rm_error *err, const char *what, size_t bytes);
// Returns RM_OK if low ≤ value ≤ high, else fails with `code`.
rm_code rm_check_range(rm_error *err, rm_code code, const char *name, int64_t value, int64_t low,
                       int64_t high);
// Appends to the message, for errors that list all wrong values. Cut with "…" at 64 KiB.
void rm_error_append(rm_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *rm_error_message(const rm_error *err);
void rm_error_clear(rm_error *err);
// Formats a number of bytes: "12 B", "1.50 GiB". Use `.text` as an argument of the same expression.
typedef struct rm_size_text {
  char text[32];
} rm_size_text;
rm_size_text rm_say_bytes(double bytes);
const char *rm_code_name(rm_code code); // "ConfigError", … : the names of the Python exceptions
