// list.h: intrusive doubly linked lists with a sentinel. An element is in at most one list; its
// rm_link is its first member, so a link is cast to it. Every operation is a few stores: nothing on
// the step path searches or allocates.
#pragma once

typedef struct rm_link {
  struct rm_link *prev, *next;
} rm_link;

static inline void rm_list_init(rm_link *head) { head->prev = head->next = head; }
static inline int rm_list_empty(const rm_link *head) { return head->next == head; }
static inline void rm_list_insert_before(rm_link *at, rm_link *link) {
  link->prev = at->prev;
  link->next = at;
  at->prev->next = link;
  at->prev = link;
}
// Afterwards the link is a list of its own, so that removing twice is harmless.
static inline void rm_list_remove(rm_link *link) {
  link->prev->next = link->next;
  link->next->prev = link->prev;
  link->prev = link->next = link;
}
