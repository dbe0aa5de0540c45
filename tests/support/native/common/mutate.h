// mutate.h: valid names and tensors with a mistake made in them. The buffer of a mutated text has
// NAME_ROOM bytes.
#pragma once

#include <limits.h>

#include "common/layouts.h"
#include "common/spellings.h"

enum { NAME_ROOM = 1 << 20 };

static inline int64_t wrapping_add(int64_t a, int64_t b) {
  return (int64_t)((uint64_t)a + (uint64_t)b);
}

// ------------------------------------------------------------------------------------------ names
// In a wrapper or two, and with "model.", in the places where those stand.
static inline size_t dress(fuzz *f, char *out, const char *bare) {
  static const char *const words[] = {"_orig_mod.", "module.", "_fsdp_wrapped_module.",
                                      "_checkpoint_wrapped_module.", "model."};
  size_t n = 0;
  const int wrapped = fuzz_one_in(f, 4);
  if (wrapped && fuzz_one_in(f, 2)) n += (size_t)sprintf(out, "%s", words[fuzz_below(f, 5)]);
  if (fuzz_one_in(f, 2)) n += (size_t)sprintf(out + n, "model.");
  for (const char *from = bare; *from;) {
    if (wrapped && fuzz_one_in(f, 3)) n += (size_t)sprintf(out + n, "%s", words[fuzz_below(f, 4)]);
    do out[n++] = *from;
    while (*from++ != '.' && *from);
  }
  return n;
}

// Replaces the bytes [at, at + cut) of the name in `text` by another text.
static inline size_t splice(char *text, size_t n, size_t at, size_t cut, const char *with,
                            size_t length) {
  memmove(text + at + length, text + at + cut, n - at - cut);
  memcpy(text + at, with, length);
  return n - cut + length;
}

static inline size_t mutate_number(fuzz *f, char *text, size_t n) {
  size_t at = (size_t)fuzz_below(f, (int64_t)n), end;
  while (at < n && (text[at] < '0' || text[at] > '9')) at++;
  if (at == n) return n;
  while (at > 0 && text[at - 1] >= '0' && text[at - 1] <= '9') at--;
  for (end = at; end < n && text[end] >= '0' && text[end] <= '9'; end++) {}
  text[n] = 0;
  const long long value = atoll(text + at);
  char with[64];
  static const char *const forms[] = {"0%lld",  "+%lld",  "-%lld",  " %lld",  "%lld ",
                                      "%lld.0", "0x%llx", "%llde0", "00%lld", "%lld\xC2\xB2"};
  int length;
  if (fuzz_one_in(f, 2))
    length = sprintf(with, "%" PRId64, wrapping_add(value, fuzz_below(f, 5) - 2));
  else if (fuzz_one_in(f, 3)) length = sprintf(with, "%" PRIu64, (uint64_t)fuzz_integer(f));
  else length = sprintf(with, forms[fuzz_below(f, 10)], value);
  return splice(text, n, at, end - at, with, (size_t)length);
}

static const char *const scraps[] = {".weight",
                                     ".",
                                     "..",
                                     "model.",
                                     "module.",
                                     "module",
                                     "_EFD",
                                     " ",
                                     "layers.",
                                     "\xC3",
                                     "\xC3\xA9",
                                     "\xED\xA0\x80",
                                     "\xC0\x80",
                                     "\xF0\x9F\x98\x80",
                                     "\xF4\x90\x80\x80",
                                     "\xF5\x80\x80\x80",
                                     "_orig_mod.",
                                     "%s%n",
                                     "\n",
                                     "#",
                                     "bias",
                                     "model",
                                     "experts."};
enum { SCRAPS = sizeof scraps / sizeof *scraps };

static inline size_t mutate_name(fuzz *f, const book *b, char *text, size_t n) {
  if (n == 0) return splice(text, 0, 0, 0, "x", 1);
  const size_t at = (size_t)fuzz_below(f, (int64_t)n), some = (size_t)fuzz_below(f, 12);
  const char *scrap = scraps[fuzz_below(f, SCRAPS)];
  switch (fuzz_below(f, 11)) {
    case 0: text[at] ^= (char)(1 << fuzz_below(f, 8)); return n;
    case 1: text[at] = (char)fuzz_bits(f); return n;
    case 2: return at;
    case 3: return splice(text, n, at, some < n - at ? some : n - at, "", 0);
    case 4: return splice(text, n, at, 0, scrap, strlen(scrap));
    case 5: return splice(text, n, fuzz_one_in(f, 2) ? 0 : n, 0, scrap, strlen(scrap));
    case 6: return splice(text, n, at, 0, "", 1); // a NUL
    case 7: { // another's end
      const char *other = b->names[fuzz_below(f, b->n_names)].name, *from = strchr(other, '.');
      const char *dot = memchr(text, '.', n);
      for (const char *next; dot && from && fuzz_one_in(f, 2);
           dot = next, from = strchr(from + 1, '.'))
        if (!(next = memchr(dot + 1, '.', n - (size_t)(dot + 1 - text)))) break;
      if (!dot || !from) return n;
      return splice(text, n, (size_t)(dot - text), n - (size_t)(dot - text), from, strlen(from));
    }
    default: return mutate_number(f, text, n);
  }
}

// Around the limit, by wrappers that mean nothing or by bytes that do, and far over it.
static inline size_t stretch_name(fuzz *f, char *text, size_t n) {
  const size_t to = fuzz_one_in(f, 64) ? NAME_ROOM : BOOK_NAME_MAX - 8 + (size_t)fuzz_below(f, 16);
  if (fuzz_one_in(f, 4)) {
    memset(text + n, 'x', to - n);
    return to;
  }
  const size_t more = to > NAME_ROOM / 2 ? 0 : (to - n) / 7;
  memmove(text + 7 * more, text, n);
  for (size_t i = 0; i < more; i++) memcpy(text + 7 * i, "module.", 7);
  return n + 7 * more;
}

// ---------------------------------------------------------------------------------------- tensors
// A stride with which the dim ends within a few elements of the limit of 64 bits.
static inline int64_t overflowing(fuzz *f, int64_t extent) {
  const int64_t by = extent > 2 ? extent - 1 : 1, end = INT64_MAX >> fuzz_below(f, 5);
  const int64_t stride = wrapping_add(end / by, fuzz_below(f, 9) - 6);
  return fuzz_one_in(f, 2) ? stride : wrapping_add(0, ~stride);
}

static inline void mutate_shape(fuzz *f, rm_tensor *t) {
  int64_t *dim = &t->shape[fuzz_below(f, t->n_dims > 0 && t->n_dims <= 4 ? t->n_dims : 4)];
  switch (fuzz_below(f, 5)) {
    case 0: *dim = wrapping_add(*dim, fuzz_one_in(f, 2) ? 1 : -1); return;
    case 1: *dim = fuzz_integer(f); return;
    case 2: {
      const int64_t first = t->shape[0];
      t->shape[0] = t->shape[1], t->shape[1] = first;
      return;
    }
    case 3: t->n_dims = (int)((unsigned)t->n_dims + (fuzz_one_in(f, 2) ? 1 : UINT_MAX)); return;
    default: t->n_dims = (int)fuzz_integer(f);
  }
}

static inline void mutate_strides(fuzz *f, rm_tensor *t) {
  const int64_t i = fuzz_below(f, t->n_dims > 0 && t->n_dims <= 4 ? t->n_dims : 4);
  int64_t *stride = &t->strides[i];
  switch (fuzz_below(f, 6)) {
    case 0: *stride = wrapping_add(*stride, fuzz_one_in(f, 2) ? 1 : -1); return;
    case 1: *stride = fuzz_integer(f); return;
    case 2: *stride = 0; return;
    case 3: *stride = (int64_t)(0 - (uint64_t)*stride); return;
    case 4: *stride = overflowing(f, t->shape[i]); return;
    default: {
      const int64_t first = t->strides[0];
      t->strides[0] = t->strides[1], t->strides[1] = first;
    }
  }
}

static inline void mutate_span(fuzz *f, rm_tensor *t) {
  int64_t *span = fuzz_one_in(f, 2) ? &t->span_lo : &t->span_hi;
  switch (fuzz_below(f, 4)) {
    case 0: *span = fuzz_integer(f); return;
    case 1: t->span_lo = t->span_hi = 0; return;
    case 2: *span = wrapping_add(*span, 1); return;
    default: *span = wrapping_add(*span, -1);
  }
}

static inline void mutate_data(fuzz *f, rm_tensor *t) {
  const uintptr_t places[] = {0,
                              1,
                              8,
                              (uintptr_t)fuzz_below(f, 1 << 20),
                              UINTPTR_MAX - (uintptr_t)fuzz_below(f, 1 << 18),
                              UINTPTR_MAX};
  t->data = (const void *)places[fuzz_below(f, 6)];
}

static inline void mutate_tensor(fuzz *f, rm_tensor *t) {
  switch (fuzz_below(f, 8)) {
    case 0:
    case 1: mutate_shape(f, t); return;
    case 2:
    case 3: mutate_strides(f, t); return;
    case 4:
    case 5: mutate_span(f, t); return;
    case 6:
      t->dtype =
          (rm_src_dtype)(fuzz_one_in(f, 2) ? fuzz_below(f, 6) : (int64_t)(uint32_t)fuzz_integer(f));
      return;
    default: mutate_data(f, t);
  }
}
