/* The place of a user's rule in the fold's kernels. A module of fastps' own rules has none; the module of a user's rule has that
 * rule's text in the place of this file. */
