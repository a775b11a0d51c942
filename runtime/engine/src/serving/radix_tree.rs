//! A radix tree over token sequences: it finds those that share most with a prompt. A lookup costs as many
//! steps as the prompt has tokens that are known, however many sequences there are.

use std::collections::BTreeMap;

use mlcc_text::TokenId;

const ROOT: usize = 0;

/// Texts by their tokens, each with a number of its owner's.
pub(super) struct RadixTree {
    /// All nodes; free ones have no parent's edge to them.
    nodes: Vec<RadixNode>,
    free: Vec<usize>,
}

#[derive(Default)]
struct RadixNode {
    parent: usize,
    /// Tokens from its parent to it; none of the root alone.
    edge: Vec<TokenId>,
    /// Children by the first tokens of their edges.
    children: BTreeMap<TokenId, usize>,
    /// Texts that end here.
    ids: Vec<u64>,
}

/// A node on the way of a prompt.
struct RadixPathNode {
    node: usize,
    /// The number of tokens of the prompt that are shared up to here.
    tokens: usize,
    /// True if that is all of the node's edge.
    whole: bool,
}

pub(super) fn common_prefix_len(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Default for RadixTree {
    fn default() -> Self {
        RadixTree { nodes: vec![RadixNode::default()], free: Vec::new() }
    }
}

impl RadixTree {
    pub fn is_empty(&self) -> bool {
        let RadixNode { children, ids, .. } = &self.nodes[ROOT];
        children.is_empty() && ids.is_empty()
    }

    pub fn insert(&mut self, tokens: &[TokenId], id: u64) {
        let (mut node, mut rest) = (ROOT, tokens);
        while let Some(first) = rest.first() {
            let Some(&child) = self.nodes[node].children.get(first) else {
                node = self.add_node(node, rest.to_vec());
                break;
            };
            let shared = common_prefix_len(&self.nodes[child].edge, rest);
            node = if shared < self.nodes[child].edge.len() { self.split_edge(child, shared) } else { child };
            rest = &rest[shared..];
        }
        self.nodes[node].ids.push(id);
    }

    /// Forgets a text, which is there.
    pub fn remove(&mut self, tokens: &[TokenId], id: u64) {
        let Some(mut node) = self.find_node(tokens) else { return };
        self.nodes[node].ids.retain(|&other| other != id);
        while node != ROOT && self.nodes[node].ids.is_empty() && self.nodes[node].children.is_empty() {
            let RadixNode { parent, edge, .. } = std::mem::take(&mut self.nodes[node]);
            self.nodes[parent].children.remove(&edge[0]);
            self.free.push(node);
            node = parent;
        }
        self.merge_with_child(node);
    }

    /// Texts that are begins of a prompt, the longest first, with their lengths.
    pub fn prefixes_of(&self, prompt: &[TokenId]) -> impl Iterator<Item = (usize, u64)> {
        let whole = self.path_to(prompt).into_iter().rev().filter(|passed| passed.whole);
        whole.flat_map(|RadixPathNode { node, tokens, .. }| {
            self.nodes[node].ids.iter().map(move |&id| (tokens, id))
        })
    }

    /// Texts that share a begin with a prompt, those that share most first, with how many tokens that is.
    pub fn nearest(&self, prompt: &[TokenId]) -> NearestPrefixes<'_> {
        NearestPrefixes {
            tree: self,
            path: self.path_to(prompt),
            seen: ROOT,
            below: Vec::new(),
            tokens: 0,
            ids: [].iter(),
        }
    }

    /// The texts of exactly these tokens.
    pub fn find_exact(&self, tokens: &[TokenId]) -> &[u64] {
        self.find_node(tokens).map_or(&[], |node| &self.nodes[node].ids)
    }

    /// True if some sequence begins with these tokens.
    pub fn has_extension(&self, tokens: &[TokenId]) -> bool {
        self.nearest(tokens).next().is_some_and(|(shared, _)| shared == tokens.len())
    }

    /// The path from the root on: the nodes whose edges a prompt shares, the last one perhaps in part, and
    /// how much it shares up to there.
    fn path_to(&self, prompt: &[TokenId]) -> Vec<RadixPathNode> {
        let (mut node, mut tokens) = (ROOT, 0);
        let mut path = vec![RadixPathNode { node, tokens, whole: true }];
        while let Some(&child) = prompt.get(tokens).and_then(|first| self.nodes[node].children.get(first)) {
            let edge = &self.nodes[child].edge;
            let shared = common_prefix_len(edge, &prompt[tokens..]);
            tokens += shared;
            let whole = shared == edge.len();
            path.push(RadixPathNode { node: child, tokens, whole });
            if !whole {
                break;
            }
            node = child;
        }
        path
    }

    fn find_node(&self, tokens: &[TokenId]) -> Option<usize> {
        let last = self.path_to(tokens).pop().filter(|passed| passed.whole && passed.tokens == tokens.len());
        last.map(|passed| passed.node)
    }

    fn add_node(&mut self, parent: usize, edge: Vec<TokenId>) -> usize {
        let first = edge[0];
        let node = RadixNode { parent, edge, ..RadixNode::default() };
        let at = match self.free.pop() {
            Some(at) => {
                self.nodes[at] = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        self.nodes[parent].children.insert(first, at);
        at
    }

    /// Puts a node behind the first `shared` tokens of the edge to `child`.
    fn split_edge(&mut self, child: usize, shared: usize) -> usize {
        let (parent, edge) = (self.nodes[child].parent, self.nodes[child].edge[..shared].to_vec());
        let middle = self.add_node(parent, edge);
        self.nodes[child].edge.drain(..shared);
        self.nodes[child].parent = middle;
        let first = self.nodes[child].edge[0];
        self.nodes[middle].children.insert(first, child);
        middle
    }

    /// Makes one of a node without texts and its only child.
    fn merge_with_child(&mut self, node: usize) {
        let is_needless = node != ROOT && self.nodes[node].ids.is_empty();
        if !is_needless || self.nodes[node].children.len() != 1 {
            return;
        }
        let RadixNode { parent, edge, children, .. } = std::mem::take(&mut self.nodes[node]);
        self.free.push(node);
        for child in children.into_values() {
            self.nodes[parent].children.insert(edge[0], child);
            self.nodes[child].parent = parent;
            self.nodes[child].edge.splice(0..0, edge.iter().copied());
        }
    }
}

/// See [`RadixTree::nearest`].
pub(super) struct NearestPrefixes<'r> {
    tree: &'r RadixTree,
    /// The rest of the path to the prompt.
    path: Vec<RadixPathNode>,
    /// The node of the path that came before: all below it have been given.
    seen: usize,
    /// Nodes that share as much as the one of the path above them.
    below: Vec<usize>,
    tokens: usize,
    ids: std::slice::Iter<'r, u64>,
}

impl Iterator for NearestPrefixes<'_> {
    type Item = (usize, u64);

    fn next(&mut self) -> Option<(usize, u64)> {
        loop {
            if let Some(&id) = self.ids.next() {
                return Some((self.tokens, id));
            }
            let (node, seen) = match self.below.pop() {
                Some(node) => (node, ROOT),
                None => {
                    let RadixPathNode { node, tokens, .. } =
                        self.path.pop().filter(|passed| passed.tokens > 0)?;
                    self.tokens = tokens;
                    (node, std::mem::replace(&mut self.seen, node))
                }
            };
            let RadixNode { children, ids, .. } = &self.tree.nodes[node];
            self.below.extend(children.values().rev().filter(|&&child| child != seen));
            self.ids = ids.iter();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tokens() -> impl Strategy<Value = Vec<TokenId>> {
        proptest::collection::vec(0..3, 0..9)
    }

    /// Edges fit together, and nothing is there without a reason.
    fn check(tree: &RadixTree, texts: usize) {
        let mut seen = 0;
        let mut nodes = vec![ROOT];
        while let Some(at) = nodes.pop() {
            let node = &tree.nodes[at];
            seen += node.ids.len();
            assert!(at == ROOT || !node.ids.is_empty() || node.children.len() > 1);
            for (first, &child) in &node.children {
                assert_eq!((tree.nodes[child].parent, tree.nodes[child].edge.first()), (at, Some(first)));
                nodes.push(child);
            }
        }
        assert_eq!(seen, texts);
        assert!(texts > 0 || tree.nodes.len() == 1 + tree.free.len());
    }

    proptest! {
        /// The tree says what a look at each text says.
        #[test]
        fn looks_find_what_a_search_finds(
            changes in proptest::collection::vec((tokens(), any::<proptest::sample::Index>(), 0..3usize), 0..60),
            prompt in tokens(),
        ) {
            let (mut tree, mut texts) = (RadixTree::default(), Vec::<(Vec<TokenId>, u64)>::new());
            for (id, (text, which, what)) in changes.into_iter().enumerate() {
                if what == 0 && !texts.is_empty() {
                    let (text, id) = texts.swap_remove(which.index(texts.len()));
                    tree.remove(&text, id);
                } else {
                    tree.insert(&text, id as u64);
                    texts.push((text, id as u64));
                }
                check(&tree, texts.len());
                assert_eq!(tree.is_empty(), texts.is_empty());
            }
            for prompt in texts.iter().map(|(text, _)| text).chain([&prompt]) {
                let in_order = |mut all: Vec<(usize, u64)>| {
                    assert!(all.is_sorted_by(|a, b| a.0 >= b.0));
                    all.sort_unstable();
                    all
                };
                let search = |of: &dyn Fn(&[TokenId]) -> Option<usize>| {
                    let mut all: Vec<_> = texts.iter().filter_map(|(t, id)| Some((of(t)?, *id))).collect();
                    all.sort_unstable();
                    all
                };
                let shared = |text: &[TokenId]| Some(common_prefix_len(text, prompt)).filter(|&tokens| tokens > 0);
                assert_eq!(in_order(tree.nearest(prompt).collect()), search(&shared));
                let begins = |text: &[TokenId]| prompt.starts_with(text).then_some(text.len());
                assert_eq!(in_order(tree.prefixes_of(prompt).collect()), search(&begins));
                let mut same: Vec<u64> = tree.find_exact(prompt).to_vec();
                same.sort_unstable();
                let all = search(&|text| (text == &prompt[..]).then_some(0));
                assert_eq!(same, all.into_iter().map(|(_, id)| id).collect::<Vec<_>>());
                let beyond = texts.iter().any(|(text, _)| text.starts_with(prompt));
                assert_eq!(tree.has_extension(prompt), beyond && !prompt.is_empty());
            }
        }
    }

    /// Edges of a sequence that no other shares are one node.
    #[test]
    fn nodes_are_as_many_as_begins_differ() {
        let mut tree = RadixTree::default();
        let texts: Vec<Vec<TokenId>> =
            (0..500).map(|at| vec![7; 100].into_iter().chain([at; 50]).collect()).collect();
        for (id, text) in texts.iter().enumerate() {
            tree.insert(text, id as u64);
        }
        assert_eq!(tree.nodes.len(), 1 + 1 + 500);
        assert_eq!(tree.nearest(&texts[321]).next(), Some((150, 321)));
        assert_eq!(tree.nearest(&texts[321][..120]).next(), Some((120, 321)));
    }
}
