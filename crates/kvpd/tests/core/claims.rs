//! Blocks of requests in flight, against sets of numbers.

use std::collections::HashSet;

use kvpd::{Claims, PlanError, Runs};
use proptest::prelude::*;

fn runs(blocks: impl IntoIterator<Item = u32>) -> Runs {
    let ids: Vec<i64> = blocks.into_iter().map(i64::from).collect();
    Runs::pair(&ids, &ids).unwrap()
}

#[test]
fn all_or_none() {
    let mut claims = Claims::new(65);
    claims.claim(&runs([64, 3])).unwrap();
    let error = claims.claim(&runs([5, 64, 3, 6])).unwrap_err();
    assert_eq!(error, PlanError::BlocksInFlight { blocks: vec![3, 64] });
    assert_eq!(claims.num_claimed(), 2);
    let error = claims.claim(&runs([7, 65])).unwrap_err();
    assert_eq!(error, PlanError::NoSuchBlock { side: "local", block: 65, num_blocks: 65 });
    assert_eq!(claims.num_claimed(), 2);
    claims.release(&runs([64, 3]));
    assert_eq!(claims.num_claimed(), 0);
    claims.claim(&runs([5, 64, 3, 6])).unwrap();
}

proptest! {
    #[test]
    fn a_request_is_let_in_if_no_other_has_its_blocks(
        requests in prop::collection::vec(prop::collection::hash_set(0_u32..200, 0..9), 1..40),
    ) {
        let mut claims = Claims::new(200);
        let mut live: Vec<HashSet<u32>> = Vec::new();
        for request in requests {
            let is_free = live.iter().all(|other| other.is_disjoint(&request));
            prop_assert_eq!(claims.claim(&runs(request.clone())).is_ok(), is_free);
            if is_free {
                live.push(request);
            } else {
                claims.release(&runs(live.remove(0)));
            }
            prop_assert_eq!(claims.num_claimed(), live.iter().map(HashSet::len).sum::<usize>());
        }
    }
}
