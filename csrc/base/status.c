// status.c: error values. The message is on the heap, so that an error can list a thousand names.
// It comes from the C library, so that the tests' failure hook (memory.h) does not fail it.
#define _GNU_SOURCE
#include "base/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGE_MAX = 64 * 1024 };
static const char ELLIPSIS[] = "…";

// Replaces the message by one from vasprintf, NULL: none. Cuts a long one at a character boundary.
static void set_message(rm_error *err, char *message) {
  if (message && strlen(message) > MESSAGE_MAX) {
    size_t end = MESSAGE_MAX - sizeof ELLIPSIS;
    while (((unsigned char)message[end] & 0xC0) == 0x80) end--;
    memcpy(message + end, ELLIPSIS, sizeof ELLIPSIS);
  }
  free(err->message);
  err->message = message;
}

rm_code rm_fail(rm_error *err, rm_code code, const char *format, ...) {
  if (!err) return code;
  char *message;
  va_list args;
  va_start(args, format);
  set_message(err, vasprintf(&message, format, args) < 0 ? NULL : message);
  va_end(args);
  return err->code = code;
}

rm_code rm_no_memory(rm_error *err, const char *what, size_t bytes) {
  return rm_fail(err, RM_E_MEMORY, "memory: expected %s for %s, got none",
                 bytes ? rm_say_bytes((double)bytes).text : "room", what);
}

rm_code rm_check_range(rm_error *err, rm_code code, const char *name, int64_t value, int64_t low,
                       int64_t high) {
  RM_FAIL_IF(value < low || value > high, code, "%s: expected %ld to %ld, got %ld", name, low, high,
             value);
  return RM_OK;
}

void rm_error_append(rm_error *err, const char *format, ...) {
  if (!err || !err->message || strlen(err->message) > MESSAGE_MAX - 2 * sizeof ELLIPSIS) return;
  char *more, *joined;
  va_list args;
  va_start(args, format);
  if (vasprintf(&more, format, args) >= 0) {
    if (asprintf(&joined, "%s%s", err->message, more) >= 0) set_message(err, joined);
    free(more);
  }
  va_end(args);
}

rm_size_text rm_say_bytes(double bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
  int unit = 0;
  for (; unit < 3 && (bytes >= 1024 || bytes <= -1024); unit++) bytes /= 1024;
  rm_size_text size;
  snprintf(size.text, sizeof size.text, unit ? "%.2f %s" : "%.0f %s", bytes, units[unit]);
  return size;
}

const char *rm_error_message(const rm_error *err) {
  if (!err) return "";
  return err->message ? err->message : rm_code_name(err->code);
}

void rm_error_clear(rm_error *err) {
  if (!err) return;
  free(err->message);
  *err = (rm_error)RM_ERROR_INIT;
}

static const char *const code_names[RM_N_CODE] = {
    [RM_OK] = "OK",
    [RM_E_CONFIG] = "ConfigError",
    [RM_E_REQUEST] = "RequestError",
    [RM_E_STATE] = "StateError",
    [RM_E_NOT_SYNCED] = "NotSyncedError",
    [RM_E_VERSION] = "VersionError",
    [RM_E_MISSING_KEY] = "MissingKeyError",
    [RM_E_UNEXPECTED_KEY] = "UnexpectedKeyError",
    [RM_E_DUPLICATE_KEY] = "DuplicateKeyError",
    [RM_E_TIED_WEIGHT] = "TiedWeightError",
    [RM_E_SHAPE] = "ShapeError",
    [RM_E_DTYPE] = "DTypeError",
    [RM_E_LAYOUT] = "LayoutError",
    [RM_E_UNSUPPORTED_TENSOR] = "UnsupportedTensorError",
    [RM_E_NONFINITE] = "NonFiniteError",
    [RM_E_LIMIT] = "LimitError",
    [RM_E_INCOMPLETE_SYNC] = "IncompleteSyncError",
    [RM_E_CAPACITY] = "CapacityError",
    [RM_E_NUMERICS] = "NumericsError",
    [RM_E_MEMORY] = "MemoryError",
    [RM_E_MESH_MISMATCH] = "MeshMismatchError",
    [RM_E_COLLECTIVE_MISMATCH] = "CollectiveMismatchError",
    [RM_E_COLLECTIVE_TIMEOUT] = "CollectiveTimeoutError",
    [RM_E_RANK_LOST] = "RankLostError",
    [RM_E_SYNC_ABORTED] = "SyncAbortedError",
    [RM_E_AUTH] = "AuthError",
    [RM_E_DEVICE] = "DeviceError",
};

const char *rm_code_name(rm_code code) {
  return (unsigned)code < RM_N_CODE && code_names[code] ? code_names[code] : "Error";
}
