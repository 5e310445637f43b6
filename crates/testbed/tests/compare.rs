//! `compare_collections` between two real deployments.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use bson::raw::{RawBson, RawDocumentBuf};
use bson::{Bson, Document, doc, oid::ObjectId, rawdoc};
use halocline_testbed::{Difference, MOST_DIFFERENCES, ReplicaSet, compare_collections};
use mongodb::Client;

struct Two {
    _sets: [ReplicaSet; 2],
    a: Client,
    b: Client,
}

impl Two {
    async fn start() -> Self {
        let (a, b) = tokio::join!(
            ReplicaSet::builder().name("a").start(),
            ReplicaSet::builder().name("b").start()
        );
        let sets = [a.unwrap(), b.unwrap()];
        let a = sets[0].client().await.unwrap();
        let b = sets[1].client().await.unwrap();
        Self { _sets: sets, a, b }
    }

    async fn put(&self, coll: &str, in_a: Vec<RawDocumentBuf>, in_b: Vec<RawDocumentBuf>) {
        for (client, documents) in [(&self.a, in_a), (&self.b, in_b)] {
            let collection = client.database("test").collection::<RawDocumentBuf>(coll);
            // In pieces: 15 MB documents in one insert would be much for a small cache.
            for documents in documents.chunks(1 + documents.len() / 10) {
                collection.insert_many(documents).await.unwrap();
            }
        }
    }

    async fn compare(&self, coll: &str) -> Vec<Difference> {
        compare_collections(&self.a, &self.b, "test", coll).await.unwrap()
    }
}

#[tokio::test]
async fn differences_are_found_and_equal_documents_are_not_reported() {
    let two = Two::start().await;
    assert_eq!(two.compare("absent").await, []);

    // Every kind of _id, inserted in different orders.
    let ids: Vec<Bson> = vec![
        Bson::MinKey,
        Bson::Null,
        Bson::Int32(1),
        Bson::Double(1.5),
        Bson::Double(f64::NAN),
        Bson::Int64(i64::MAX),
        Bson::Decimal128("2.50".parse().unwrap()),
        "abc".into(),
        "ABC".into(),
        doc! {}.into(),
        doc! {"x": 1, "y": 2}.into(),
        doc! {"y": 2, "x": 1}.into(),
        bson::Uuid::new().into(),
        ObjectId::new().into(),
        true.into(),
        bson::DateTime::now().into(),
        Bson::Timestamp(bson::Timestamp { time: 5, increment: 6 }),
    ];
    let documents: Vec<RawDocumentBuf> = ids
        .iter()
        .map(|id| {
            let document: Document = doc! {"_id": id.clone(), "v": {"deep": [1, {"a.b": "$c"}]}};
            RawDocumentBuf::try_from(&document).unwrap()
        })
        .collect();
    let reversed = documents.iter().rev().cloned().collect();
    two.put("equal", documents, reversed).await;
    assert_eq!(two.compare("equal").await, []);

    // One of each difference, between documents that are equal.
    let a = vec![
        rawdoc! {"_id": 0},
        rawdoc! {"_id": 1, "only": "a"},
        rawdoc! {"_id": 3, "same": [1, 2, 3]},
        rawdoc! {"_id": 4, "n": {"m": [1_i32, 2_i32]}},
        rawdoc! {"_id": 5, "x": 1, "y": 2},
        rawdoc! {"_id": 6.0},
        rawdoc! {"_id": 7, "extra": true},
        rawdoc! {"_id": "last, and only in a"},
    ];
    let b = vec![
        rawdoc! {"_id": 0},
        rawdoc! {"_id": 2, "only": "b"},
        rawdoc! {"_id": 3, "same": [1, 2, 3]},
        rawdoc! {"_id": 4, "n": {"m": [1_i32, 2_i64]}},
        rawdoc! {"_id": 5, "y": 2, "x": 1},
        rawdoc! {"_id": 6_i32},
        rawdoc! {"_id": 7},
    ];
    two.put("unlike", a, b).await;
    let found: Vec<String> = two.compare("unlike").await.iter().map(ToString::to_string).collect();
    let expected = [
        "Int32(1) is only in the first",
        "Int32(2) is only in the second",
        "Int32(4) differs: n.m.1 is Int32(2) in the first, Int64(2) in the second",
        "Int32(5) differs: x stands in the first where y stands in the second",
        "Double(6.0) differs: _id is Double(6.0) in the first, Int32(6) in the second",
        "Int32(7) differs: extra is Boolean(true) in the first, absent in the second",
        "String(\"last, and only in a\") is only in the first",
    ];
    assert_eq!(found, expected);
}

#[tokio::test]
async fn many_and_large_documents_are_compared_in_batches_and_reports_are_bounded() {
    let two = Two::start().await;
    // More than any batch: 3 x 16 MB would not fit into one reply.
    let large = || -> Vec<RawDocumentBuf> {
        (0..3).map(|i| rawdoc! {"_id": i, "text": "x".repeat(15_000_000)}).collect()
    };
    two.put("large", large(), large()).await;
    assert_eq!(two.compare("large").await, []);

    let many = |n: i32| -> Vec<RawDocumentBuf> { (0..n).map(|i| rawdoc! {"_id": i}).collect() };
    let more = MOST_DIFFERENCES as i32 + 5;
    two.put("many", many(more), Vec::new()).await;
    let found = two.compare("many").await;
    assert_eq!(found.len(), MOST_DIFFERENCES + 1);
    assert_eq!(found.first(), Some(&Difference::OnlyInFirst { id: RawBson::Int32(0) }));
    assert_eq!(found.last(), Some(&Difference::More));

    // A case-insensitive collection: order and identity of _ids are still those of their bytes.
    let options = doc! {"create": "folded", "collation": {"locale": "en", "strength": 2}};
    for client in [&two.a, &two.b] {
        client.database("test").run_command(options.clone()).await.unwrap();
    }
    two.put("folded", vec![rawdoc! {"_id": "Abc"}], vec![rawdoc! {"_id": "aBC"}]).await;
    let found = two.compare("folded").await;
    assert_eq!(
        found,
        [
            Difference::OnlyInFirst { id: "Abc".into() },
            Difference::OnlyInSecond { id: "aBC".into() },
        ]
    );
}
