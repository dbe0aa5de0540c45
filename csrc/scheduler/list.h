// list.h: intrusive doubly linked lists with a sentinel. An element is in at most one list. Its
// rm_link is its first member, so a link can be cast to the element. Operations take a few stores,
// without searching or allocating.
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
// Afterwards the link is an empty list, so that removing it twice is harmless.
static inline void rm_list_remove(rm_link *link) {
  link->prev->next = link->next;
  link->next->prev = link->prev;
  link->prev = link->next = link;
}
