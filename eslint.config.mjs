// The page's scripts are joined into one by Python, so names are shared between files; tsc checks that they exist.
export default [
  {
    files: ["curvssl/report/*.js"],
    languageOptions: { ecmaVersion: 2022, sourceType: "script" },
    rules: {
      "no-unused-vars": ["error", { vars: "local" }],
      "no-var": "error",
      "prefer-const": "off", // a name may be set again in another file
      eqeqeq: "error",
      "no-shadow": ["error", { allow: ["_"] }],
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-unreachable": "error",
      "no-dupe-keys": "error",
      "no-self-compare": "error",
      "no-fallthrough": "error",
      "no-useless-return": "error",
    },
  },
];
